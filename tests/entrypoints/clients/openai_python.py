"""Usage: openai_python.py URL. The openai package: chats, streams, tools, completions."""

import sys

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
messages = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Name a colour."}]},
]
tool = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paint the wall.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}

answer = client.chat.completions.create(
    model=model, messages=messages, max_completion_tokens=8, store=False, metadata={"of": "a test"}
)
assert answer.choices[0].message.content
assert answer._request_id

history = [*messages, answer.choices[0].message, {"role": "user", "content": "And another?"}]
usage = None
with client.chat.completions.stream(
    model=model, messages=history, max_tokens=8, stream_options={"include_usage": True}
) as stream:
    for event in stream:
        if event.type == "chunk" and event.chunk.usage:
            usage = event.chunk.usage
assert usage is not None

called = client.chat.completions.create(
    model=model, messages=messages, tools=[tool], tool_choice="auto", max_tokens=8
)
assert called.choices[0].finish_reason

text = client.completions.create(model=model, prompt="Red, blue,", max_tokens=8, echo=True)
assert text.choices[0].text.startswith("Red, blue,")
