"""Usage: litellm_completion.py URL. LiteLLM's `completion` to an OpenAI-compatible server."""

import sys

import litellm

asked = {
    "model": "hosted_vllm/model",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "max_tokens": 8,
    "num_retries": 0,
}
messages = [{"role": "user", "content": "Name a colour."}]
tool = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paint the wall.",
        "parameters": {"type": "object", "properties": {"colour": {"type": "string"}}},
    },
}
answer = litellm.completion(messages=messages, **asked)
assert answer.choices[0].message.content
history = [*messages, answer.choices[0].message, {"role": "user", "content": "Another?"}]
stream = litellm.completion(
    messages=history, stream=True, stream_options={"include_usage": True}, **asked
)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
called = litellm.completion(messages=messages, tools=[tool], tool_choice="auto", **asked)
assert called.choices[0].finish_reason
