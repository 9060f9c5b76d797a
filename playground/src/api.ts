// The server's API, as far as the playground uses it. All addresses are relative to the page.

export interface Step {
  tokens: string[];
  source?: string;
  num_drafts?: number;
  num_accepted?: number;
}

export interface CallDelta {
  index: number;
  id?: string;
  function: { name?: string; arguments: string };
}

export interface Choice {
  delta: { content?: string; reasoning_content?: string; tool_calls?: CallDelta[] };
  finish_reason: string | null;
  speculation?: { steps: Step[] };
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
}

export interface Chunk {
  choices?: Choice[];
  usage?: Usage | null;
  error?: { message: string };
}

export interface Model {
  id: string;
  max_model_len: number;
  /** What prompts may hold: text, and images where the model sees; other servers do not say it. */
  input_modalities?: string[];
  /** How drafts are made; null when the server makes none. */
  speculation: { method: string; num_speculative_tokens: number; lookup: boolean } | null;
}

export type Body = Record<string, unknown>;

const KEY = "atom.key";

/** The server wants a key, or another one. */
export class KeyError extends Error {}

export function apiKey(): string {
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepKey(key: string): void {
  sessionStorage.setItem(KEY, key);
}

export function address(path: string): string {
  return new URL(path, document.baseURI).href;
}

export async function listModels(): Promise<Model[]> {
  const response = await ask("v1/models", {});
  return ((await response.json()) as { data: Model[] }).data;
}

/** Where the images of messages have their tokens: for each its ranges, first and number. */
export async function imageRanges(body: Body): Promise<[number, number][][]> {
  const { model, messages, tools } = body;
  const response = await ask("tokenize", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model, messages, tools }),
  });
  return ((await response.json()) as { image_ranges?: [number, number][][] }).image_ranges ?? [];
}

/** The chunks of a chat; ends after `[DONE]` and throws when the stream breaks off before. */
export async function* chat(body: Body, signal: AbortSignal): AsyncGenerator<Chunk> {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let rest = "";
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop()!;
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data) as Chunk;
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
  throw new Error("the connection ended before the answer did");
}

async function ask(path: string, init: RequestInit): Promise<Response> {
  const headers = new Headers(init.headers);
  if (apiKey()) headers.set("Authorization", `Bearer ${apiKey()}`);
  const response = await fetch(address(path), { ...init, headers, credentials: "omit" });
  if (response.ok) return response;
  const said = (await response.json().catch(() => null)) as Chunk | null;
  const message = said?.error?.message ?? `the server answered ${response.status}`;
  throw response.status === 401 ? new KeyError(message) : new Error(message);
}
