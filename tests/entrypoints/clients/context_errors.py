"""Usage: context_errors.py URL. More than the context, asked for through LiteLLM and LangChain.

Prints a line for each request, and fails when one does not raise the client's own error.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

import litellm
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

url = sys.argv[1]
with urllib.request.urlopen(f"{url}/v1/models") as listed:
    card = json.load(listed)["data"][0]
model, context = card["id"], card["max_model_len"]
KEY = "none"


def chat(text: str, max_tokens: int) -> None:
    messages = [{"role": "user", "content": text}]
    litellm.completion(
        f"openai/{model}", messages, max_tokens=max_tokens, api_base=f"{url}/v1", api_key=KEY
    )


def completion(text: str, max_tokens: int) -> None:
    litellm.text_completion(
        text,
        f"text-completion-openai/{model}",
        max_tokens=max_tokens,
        api_base=f"{url}/v1",
        api_key=KEY,
    )


def responses(text: str, max_tokens: int) -> None:
    litellm.responses(
        text, f"openai/{model}", max_output_tokens=max_tokens, api_base=f"{url}/v1", api_key=KEY
    )


def messages(text: str, max_tokens: int) -> None:
    asked = [{"role": "user", "content": text}]
    litellm.completion(
        f"anthropic/{model}", asked, max_tokens=max_tokens, api_base=url, api_key=KEY
    )


def langchain_chat(text: str, max_tokens: int) -> None:
    client: Any = ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key=KEY, max_tokens=max_tokens, max_retries=0
    )
    client.invoke(text)


def langchain_responses(text: str, max_tokens: int) -> None:
    client: Any = ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key=KEY,
        max_tokens=max_tokens,
        max_retries=0,
        use_responses_api=True,
    )
    client.invoke(text)


def langchain_messages(text: str, max_tokens: int) -> None:
    client: Any = ChatAnthropic(
        model=model, base_url=url, api_key=KEY, max_tokens=max_tokens, max_retries=0
    )
    client.invoke(text)


EXPECTED: dict[Callable[[str, int], None], type[Exception]] = {
    chat: litellm.ContextWindowExceededError,
    completion: litellm.ContextWindowExceededError,
    responses: litellm.ContextWindowExceededError,
    messages: litellm.ContextWindowExceededError,
    langchain_chat: ContextOverflowError,
    langchain_responses: ContextOverflowError,
    langchain_messages: ContextOverflowError,
}

for ask, expected in EXPECTED.items():
    for text, max_tokens in (("word " * 2 * context, 5), ("hi", context)):
        try:
            ask(text, max_tokens)
        except expected as error:
            print(f"{ask.__name__}: {type(error).__name__}")
        else:
            raise AssertionError(f"{ask.__name__} was answered")
