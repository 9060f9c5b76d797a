// From a conversation and the settings to a request, and to the same request for other programs.
import { textOf } from "./answer";
import { address, apiKey, type Body } from "./api";
import type { Picture } from "./pictures";
import type { Settings, Turn } from "./store";

/** A setting that cannot be sent; the message names it. */
export class SettingError extends Error {}

export function createBody(turns: Turn[], settings: Settings): Body {
  const body: Body = { model: settings.model, messages: messages(turns, settings.system) };
  const numbers: [string, string][] = [
    ["temperature", settings.temperature],
    ["top_p", settings.topP],
    ["seed", settings.seed],
    ["max_tokens", settings.maxTokens],
    ["num_speculative_tokens", settings.speculation ? settings.drafts : ""],
  ];
  for (const [name, text] of numbers) {
    if (text.trim() === "") continue;
    const value = Number(text);
    if (Number.isNaN(value)) throw new SettingError(`${name} is not a number: ${text}`);
    if (Math.abs(value) > Number.MAX_SAFE_INTEGER) {
      throw new SettingError(`${name} ${text} is beyond ±2^53, which a browser can send exactly.`);
    }
    body[name] = value;
  }
  if (settings.tools.trim()) body.tools = parse("Tools", settings.tools);
  if (settings.schema.trim()) {
    const schema = parse("The JSON schema", settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (!settings.speculation) body.speculation = false;
  body.stream = true;
  body.stream_options = { include_usage: true, include_speculation: true };
  return body;
}

export function asCurl(body: Body): string {
  const lines = [`curl -N ${address("v1/chat/completions")}`, `-H 'Content-Type: application/json'`];
  if (apiKey()) lines.push(`-H "Authorization: Bearer $ATOM_API_KEY"`);
  lines.push(`-d '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`);
  return lines.join(" \\\n  ");
}

export function asPython(body: Body): string {
  const { model, messages, speculation, num_speculative_tokens, ...others } = body;
  const fields = Object.entries({ model, messages, ...others });
  const own = Object.entries({ speculation, num_speculative_tokens }).filter(([, v]) => v !== undefined);
  if (own.length) fields.push(["extra_body", Object.fromEntries(own)]);
  const key = apiKey() ? 'os.environ["ATOM_API_KEY"]' : '"none"';
  const spelled = fields.map(([name, value]) => `    ${name}=${python(value)},`).join("\n");
  return `${apiKey() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${address("v1")}", api_key=${key})
stream = client.chat.completions.create(
${spelled}
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
`;
}

function messages(turns: Turn[], system: string): Body[] {
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  return [...first, ...turns.filter(isSaid).map(message)];
}

/** An answer that failed before its first token was none. */
function isSaid(turn: Turn): boolean {
  if (turn.role !== "assistant") return true;
  const { content, reasoning, calls } = turn.answer;
  return content.length + reasoning.length + calls.length > 0;
}

function message(turn: Turn): Body {
  if (turn.role === "user") return { role: "user", content: contentOf(turn) };
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.id, content: turn.text };
  const { content, reasoning, calls } = turn.answer;
  const said: Body = { role: "assistant", content: textOf(content) };
  if (reasoning.length) said.reasoning_content = textOf(reasoning);
  if (calls.length) {
    said.tool_calls = calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return said;
}

function contentOf({ text, pictures }: { text: string; pictures?: Picture[] }): unknown {
  if (!pictures?.length) return text;
  const images = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...images, { type: "text", text }] : images;
}

function parse(what: string, text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingError(`${what}: ${(error as Error).message}`);
  }
}

/** A JSON value as Python writes it. */
function python(value: unknown): string {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    const items = Object.entries(value as object).map(([k, v]) => `${python(k)}: ${python(v)}`);
    return `{${items.join(", ")}}`;
  }
  return JSON.stringify(value);
}
