// Usage: node ai_sdk.mjs URL. Vercel's AI SDK with its OpenAI-compatible provider.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const provider = createOpenAICompatible({
  name: "atom",
  baseURL: `${process.argv[2]}/v1`,
  includeUsage: true,
});
const asked = { model: provider("model"), maxOutputTokens: 8, maxRetries: 0 };
const messages = [
  { role: "system", content: "Be brief." },
  { role: "user", content: [{ type: "text", text: "Name a colour." }] },
];
assert((await generateText({ ...asked, messages })).text);

const streamed = streamText({ ...asked, prompt: "Name a colour." });
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert(text && (await streamed.usage).outputTokens > 0);

const inputSchema = jsonSchema({
  type: "object",
  properties: { colour: { type: "string" } },
  required: ["colour"],
});
const paint = tool({ description: "Paint the wall.", inputSchema });
assert((await generateText({ ...asked, prompt: "Paint it red.", tools: { paint } })).finishReason);
