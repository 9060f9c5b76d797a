"""Usage: langchain_chat.py URL. LangChain's ChatOpenAI: invoke, stream, bound tools."""

import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def paint(colour: str) -> str:
    """Paint the wall."""
    return colour


chat = ChatOpenAI(
    base_url=f"{sys.argv[1]}/v1",
    api_key="none",
    model="model",
    max_tokens=8,
    temperature=0,
    stream_usage=True,
    max_retries=0,
)
messages = [SystemMessage("Be brief."), HumanMessage("Name a colour."), AIMessage("Red.")]
assert chat.invoke([*messages, HumanMessage("Another?")]).usage_metadata
chunks = list(chat.stream("Name a colour."))
assert any(chunk.usage_metadata for chunk in chunks)
assert chat.bind_tools([paint]).invoke("Paint it red.").response_metadata["finish_reason"]
