"""Usage: langchain_images.py URL. LangChain's ChatOpenAI sends an image, spelled in two ways."""

import sys

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJg"
    "gg=="
)
chat = ChatOpenAI(
    base_url=f"{sys.argv[1]}/v1", api_key="none", model="model", max_tokens=8, max_retries=0
)
text = {"type": "text", "text": "What is it? "}
spellings = (
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
    {"type": "image", "base64": PNG, "mime_type": "image/png"},
)
counts = set()
for image in spellings:
    usage = chat.invoke([HumanMessage([text, image])]).usage_metadata
    assert usage
    counts.add(usage["input_tokens"])
assert len(counts) == 1
assert chat.invoke([HumanMessage([text])]).usage_metadata["input_tokens"] < min(counts)
