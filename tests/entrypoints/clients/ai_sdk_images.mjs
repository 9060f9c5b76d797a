// Usage: node ai_sdk_images.mjs URL. Vercel's AI SDK sends an image as bytes and as a data URL.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const PNG =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==";
const provider = createOpenAICompatible({ name: "atom", baseURL: `${process.argv[2]}/v1` });
const text = { type: "text", text: "What is it? " };

async function inputTokens(content) {
  const messages = [{ role: "user", content }];
  const asked = { model: provider("model"), maxOutputTokens: 8, maxRetries: 0 };
  return (await generateText({ ...asked, messages })).usage.inputTokens;
}

const bytes = await inputTokens([text, { type: "image", image: Buffer.from(PNG, "base64") }]);
const url = await inputTokens([text, { type: "image", image: `data:image/png;base64,${PNG}` }]);
assert(bytes === url && bytes > (await inputTokens([text])));
