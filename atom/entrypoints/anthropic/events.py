"""The answers of `/v1/messages`: chat's stream as content blocks and their events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from atom.entrypoints.chat.generation import Usage
from atom.entrypoints.chat.translation import Block, Event, Translation
from atom.entrypoints.http.errors import ApiError

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageTranslation(Translation):
    """A message and its events (Anthropic's Messages API).

    Args:
        head: what the message says from its start: `id`, `model`.
        applied_edits: of `context_management`, if the request has it.
    """

    def __init__(
        self, head: Mapping[str, str], applied_edits: list[dict[str, Any]] | None = None
    ) -> None:
        super().__init__()
        self._edits: dict[str, Any] = {}
        if applied_edits is not None:
            self._edits = {"context_management": {"applied_edits": applied_edits}}
        self._head = {"type": "message", "role": "assistant", **head}
        self._usage: dict[str, Any] = {}

    def start(self, usage: Usage) -> list[Event]:
        opening = {**_message_usage(usage), "output_tokens": 0}
        unknown = {"stop_reason": None, "stop_sequence": None}
        message: dict[str, Any] = {**self._head, "content": [], **unknown, "usage": opening}
        return [{"type": "message_start", "message": message}]

    def whole(self) -> dict[str, Any]:
        content = [_content(block) for block in self.blocks]
        ending = {**self._ending(), "usage": self._usage, **self._edits}
        return {**self._head, "content": content, **ending}

    def fail(self, error: ApiError) -> list[Event]:
        return [error.anthropic_body()]

    def _finished(self, usage: Usage, num_reasoning_tokens: int) -> list[Event]:
        del num_reasoning_tokens  # not told apart in this API
        self._usage = _message_usage(usage)
        delta = {"type": "message_delta", "delta": self._ending(), "usage": self._usage}
        delta |= self._edits
        return [delta, {"type": "message_stop"}]

    def _block_opened(self, block: Block) -> list[Event]:
        return [
            {
                "type": "content_block_start",
                "index": block.index,
                "content_block": _content(block),
            }
        ]

    def _block_grown(self, block: Block, piece: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        del logprobs  # this API has none
        if block.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": piece}
        elif block.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": piece}
        else:
            delta = {"type": "text_delta", "text": piece}
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}]

    def _block_closed(self, block: Block) -> list[Event]:
        return [{"type": "content_block_stop", "index": block.index}]

    def _ending(self) -> dict[str, Any]:
        reason = self.finish_reason or "stop"
        if reason == "stop" and isinstance(self.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop_reason}
        return {"stop_reason": STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        head = {"type": "tool_use", "id": block.call_id, "name": block.name}
        return {**head, "input": tool_input(block.text, is_cut=not block.complete)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def tool_input(arguments: str, *, is_cut: bool) -> dict[str, Any]:
    """The object that `arguments` hold, which must be one in this API.

    Arguments that were cut give what is complete of them, as clients of streams reassemble
    it. What is no JSON object comes under the key `INVALID_JSON`, verbatim.
    """
    if not arguments:
        return {}
    try:
        value = from_json(arguments, allow_partial=is_cut)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def _message_usage(usage: Usage) -> dict[str, Any]:
    """Here `input_tokens` are those that no cache served."""
    counts = usage.as_dict()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
    }
