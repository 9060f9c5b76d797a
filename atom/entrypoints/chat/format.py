"""How the choices of a chat are spelled, whole and in chunks: one parser, one path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from atom.entrypoints.chat.generation import Choice
from atom.entrypoints.chat.logprobs import chat_logprobs, prompt_logprobs
from atom.entrypoints.chat.prompt import Prompt
from atom.entrypoints.chat.protocol import ChatCompletionRequest
from atom.entrypoints.parsing.deltas import ChatDelta, ParsedMessage
from atom.entrypoints.parsing.output_parser import ChatOutputParser
from atom.outputs import CompletionOutput, RequestOutput
from atom.text.detokenizer import Vocabulary

# Clients read one or the other.
REASONING_NAMES = ("reasoning_content", "reasoning")


class ChatFormat:
    """Choices of a chat completion.

    Args:
        create_parser: makes the parser of one choice, whose index it is given.
    """

    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        body: ChatCompletionRequest,
        vocabulary: Vocabulary,
        create_parser: Callable[[int], ChatOutputParser],
    ) -> None:
        self._vocabulary = vocabulary
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._create_parser = create_parser
        self._parsers: dict[int, ChatOutputParser] = {}
        # Of tokens whose text is held back: they go with the next chunk that says something.
        self._held_logprobs: dict[int, list[dict[str, Any]]] = {}

    def open(self, index: int, prompt: Prompt, request: RequestOutput) -> Choice | None:
        del prompt, request
        self._parsers[index] = self._create_parser(index)
        self._held_logprobs[index] = []
        return _chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, output: CompletionOutput) -> list[Choice]:
        parser = self._parsers[index]
        deltas = parser.feed(output.text)
        if output.finish_reason is not None:
            deltas += parser.finish(output.finish_reason)
        choices = [_chunk(index, _spell_delta(delta)) for delta in deltas]
        if output.finish_reason is not None:
            choices.append({**_chunk(index, {}), **_ending(parser, output)})
        held = self._held_logprobs[index]
        held += self._logprobs(output)
        if held and choices:
            choices[0]["logprobs"] = _spelled(held)
            self._held_logprobs[index] = []
        return choices

    def whole(
        self, index: int, prompt: Prompt, request: RequestOutput, output: CompletionOutput
    ) -> Choice:
        del prompt, request
        assert output.finish_reason is not None
        parser = self._create_parser(index)
        message = ParsedMessage.of(
            [*parser.feed(output.text), *parser.finish(output.finish_reason)]
        )
        return {
            "index": index,
            "message": _spell_message(message),
            "logprobs": _spelled(self._logprobs(output)),
            **_ending(parser, output),
        }

    def response_fields(self, requests: list[RequestOutput]) -> dict[str, Any]:
        if not self._wants_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(requests[0].prompt_logprobs)}

    def _logprobs(self, output: CompletionOutput) -> list[dict[str, Any]]:
        if self._num_top is None or not output.logprobs:
            return []
        return chat_logprobs(self._vocabulary, self._num_top, output.token_ids, output.logprobs)


def _ending(parser: ChatOutputParser, output: CompletionOutput) -> dict[str, Any]:
    """How an answer ended; `incomplete_tool_call` is there only if it ended in a call."""
    ending = {"finish_reason": parser.finish_reason, "stop_reason": output.stop_reason}
    if parser.incomplete_call is not None:
        ending["incomplete_tool_call"] = parser.incomplete_call
    return ending


def _chunk(index: int, delta: dict[str, Any]) -> Choice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _spelled(logprobs: list[dict[str, Any]]) -> dict[str, Any] | None:
    return {"content": logprobs, "refusal": None} if logprobs else None


def _spell_delta(delta: ChatDelta) -> dict[str, Any]:
    if delta.reasoning_content is not None:
        return dict.fromkeys(REASONING_NAMES, delta.reasoning_content)
    spelled: dict[str, Any] = msgspec.to_builtins(delta)
    return spelled


def _spell_message(message: ParsedMessage) -> dict[str, Any]:
    """OpenAI's message: `content` is null only beside tool calls."""
    calls = msgspec.to_builtins(message.tool_calls)
    content = message.content if message.content is not None or calls else ""
    spelled = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning_content is not None:
        spelled |= dict.fromkeys(REASONING_NAMES, message.reasoning_content)
    if calls:
        spelled["tool_calls"] = calls
    return spelled
