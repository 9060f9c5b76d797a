// An answer as it comes: its text by token, its calls, and what it cost.
import { chat, type Body, type Chunk, type Step, type Usage } from "./api";
import { Aligner, originsOf, type Origin, type Piece } from "./origins";

export interface Call {
  id: string;
  name: string;
  arguments: string;
}

export interface Forward {
  origins: Origin[];
}

export interface Numbers {
  tokens: number;
  forwards: number;
  byOrigin: Record<Origin, number>;
  verified: number[];
  accepted: number[];
  /** Milliseconds from the request to its first and its latest token; null before. */
  first: number | null;
  latest: number | null;
  usage: Usage | null;
}

export interface Answer {
  reasoning: Piece[];
  content: Piece[];
  calls: Call[];
  numbers: Numbers;
  /** The latest forwards. */
  recent: Forward[];
  state: "running" | "done" | "stopped" | "failed";
  finish: string | null;
  problem: string | null;
}

const RECENT = 240;

export function newAnswer(): Answer {
  const numbers = { tokens: 0, forwards: 0, byOrigin: {}, verified: [], accepted: [] };
  return {
    reasoning: [],
    content: [],
    calls: [],
    numbers: { ...numbers, first: null, latest: null, usage: null },
    recent: [],
    state: "running",
    finish: null,
    problem: null,
  };
}

export function textOf(pieces: Piece[]): string {
  return pieces.map((piece) => piece.text).join("");
}

export function perForward({ tokens, forwards }: Numbers): number | null {
  return forwards ? tokens / forwards : null;
}

/** Tokens per second after the first. */
export function speed({ tokens, first, latest }: Numbers): number | null {
  if (first === null || latest === null || latest - first < 1 || tokens < 2) return null;
  return ((tokens - 1) * 1000) / (latest - first);
}

/** Fill `answer` from a request; `changed` is called after each chunk. Throws what ended it early, but for a stop. */
export async function receive(
  answer: Answer,
  body: Body,
  signal: AbortSignal,
  changed: () => void,
): Promise<void> {
  const started = performance.now();
  const aligner = new Aligner();
  try {
    for await (const chunk of chat(body, signal)) {
      apply(answer, chunk, aligner, performance.now() - started);
      changed();
    }
    answer.state = "done";
  } catch (error) {
    answer.state = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) {
      const isLost = error instanceof TypeError && answer.numbers.tokens > 0;
      answer.problem = isLost ? "The connection was lost." : problemOf(error);
      throw error;
    }
  } finally {
    changed();
  }
}

function apply(answer: Answer, chunk: Chunk, aligner: Aligner, now: number): void {
  const numbers = answer.numbers;
  if (chunk.usage) numbers.usage = chunk.usage;
  for (const choice of chunk.choices ?? []) {
    for (const step of choice.speculation?.steps ?? []) {
      aligner.add(step);
      count(answer, step);
      numbers.first ??= now;
      numbers.latest = now;
    }
    const { content, reasoning_content, tool_calls } = choice.delta;
    if (reasoning_content) answer.reasoning.push(...aligner.take(reasoning_content));
    if (content) answer.content.push(...aligner.take(content));
    for (const piece of tool_calls ?? []) {
      const call = (answer.calls[piece.index] ??= { id: piece.id ?? "", name: "", arguments: "" });
      call.name += piece.function.name ?? "";
      call.arguments += piece.function.arguments;
    }
    answer.finish = choice.finish_reason ?? answer.finish;
  }
}

function count(answer: Answer, step: Step): void {
  const { numbers, recent } = answer;
  const origins = originsOf(step);
  numbers.tokens += origins.length;
  numbers.forwards += 1;
  for (const origin of origins) numbers.byOrigin[origin] = (numbers.byOrigin[origin] ?? 0) + 1;
  for (let i = 0; i < (step.num_drafts ?? 0); i++) {
    numbers.verified[i] = (numbers.verified[i] ?? 0) + 1;
    numbers.accepted[i] = (numbers.accepted[i] ?? 0) + (i < step.num_accepted! ? 1 : 0);
  }
  recent.push({ origins });
  if (recent.length > RECENT) recent.shift();
}

/** What a request's error means to a reader; `fetch` throws TypeError where nothing answers. */
export function problemOf(error: unknown): string {
  if (error instanceof TypeError) return "The server cannot be reached.";
  return sentence((error as Error).message);
}

function sentence(text: string): string {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
}
