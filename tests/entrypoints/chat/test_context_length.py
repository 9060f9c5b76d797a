"""Requests that exceed the context, in the words by which clients tell this error from others.

The words are those in the sources of the clients: LiteLLM, LangChain and the Claude Code CLI.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import openai
import pytest
from server_process import ServerProcess

CONTEXT = 512
LONG = "word " * 700
CLAUDE_PROMPT = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
CLAUDE_SUM = re.compile(
    r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)"
)

Ask = Callable[[openai.OpenAI, str, int | None], Any]


def _chat(client: openai.OpenAI, text: str, max_tokens: int | None) -> Any:
    asked: Any = {} if max_tokens is None else {"max_tokens": max_tokens}
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], **asked
    )


def _completion(client: openai.OpenAI, text: str, max_tokens: int | None) -> Any:
    asked: Any = {} if max_tokens is None else {"max_tokens": max_tokens}
    return client.completions.create(model="tiny", prompt=text, **asked)


def _token_ids(client: openai.OpenAI, text: str, max_tokens: int | None) -> Any:
    asked: Any = {} if max_tokens is None else {"max_tokens": max_tokens}
    return client.completions.create(model="tiny", prompt=[5] * len(text), **asked)


def _response(client: openai.OpenAI, text: str, max_tokens: int | None) -> Any:
    asked: Any = {} if max_tokens is None else {"max_output_tokens": max_tokens}
    return client.responses.create(model="tiny", input=text, **asked)


@pytest.mark.parametrize("ask", [_chat, _completion, _token_ids, _response])
@pytest.mark.parametrize(("text", "max_tokens"), [(LONG, None), (LONG, 5), ("hi", 600)])
def test_errors_of_openais_apis(
    client: openai.OpenAI, ask: Ask, text: str, max_tokens: int | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, text, max_tokens)
    error = caught.value
    assert error.code == "context_length_exceeded"
    assert "context_length_exceeded" in str(error.response.json())  # langchain-openai
    assert f"This model's maximum context length is {CONTEXT} tokens" in str(error)
    assert "this model's maximum context length is" in str(error).lower()  # LiteLLM


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/responses", {"input": LONG}),
    ],
)
def test_streams_are_refused_before_they_begin(
    server: ServerProcess, path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, json={**body, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_text_too_long_to_be_tokenised(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        _chat(client, "x" * 1_000_000, None)
    assert caught.value.code == "context_length_exceeded"
    assert f"maximum context length is {CONTEXT} tokens" in caught.value.message


def test_what_leaves_room_is_answered(client: openai.OpenAI) -> None:
    limit = CONTEXT - 1
    choice = client.completions.create(model="tiny", prompt=[5] * limit).choices[0]
    assert choice.finish_reason in ("length", "stop")


def _message(server: ServerProcess, text: str, max_tokens: int) -> str:
    import anthropic  # takes seconds, which workers without these tests save

    messages = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages
    with pytest.raises(anthropic.BadRequestError) as caught:
        messages.create(
            model="tiny", max_tokens=max_tokens, messages=[{"role": "user", "content": text}]
        )
    assert "prompt is too long" in caught.value.message  # langchain-anthropic, LiteLLM
    return caught.value.message


def test_a_prompt_that_exceeds_the_context_of_messages(server: ServerProcess) -> None:
    for text in (LONG, "x" * 1_000_000):
        found = CLAUDE_PROMPT.search(_message(server, text, 5))
        assert found is not None
        assert int(found[1]) > int(found[2]) == CONTEXT


def test_a_prompt_with_an_answer_that_exceeds_the_context_of_messages(
    server: ServerProcess,
) -> None:
    said = _message(server, "hi", 600)
    found = CLAUDE_SUM.search(said)
    assert found is not None
    prompt, asked, limit = map(int, found.groups())
    assert (asked, limit) == (600, CONTEXT)
    # What the CLI asks for next, from these numbers, fits.
    answer = server.post(
        "/v1/messages",
        json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": limit - prompt},
    )
    assert answer.status_code == 200
