// Usage: node openai_node.mjs URL. The openai package of npm: chats, streams, tools.
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [
  { role: "system", content: "Be brief." },
  { role: "user", content: "Name a colour." },
];
const answer = await client.chat.completions.create({ model, messages, max_completion_tokens: 8 });
assert(answer.choices[0].message.content && answer._request_id);

const stream = client.chat.completions.stream({
  model,
  messages: [...messages, answer.choices[0].message, { role: "user", content: "Another?" }],
  max_tokens: 8,
  stream_options: { include_usage: true },
});
assert((await stream.finalChatCompletion()).choices[0].message.content);

const parameters = { type: "object", properties: { colour: { type: "string" } } };
const called = await client.chat.completions.create({
  model,
  messages,
  max_tokens: 8,
  tools: [{ type: "function", function: { name: "paint", parameters } }],
});
assert(called.choices[0].finish_reason);
