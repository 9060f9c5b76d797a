"""Conversations as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def template_messages(conversation: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with their contents as text and the arguments of calls as objects.

    Raises:
        ValueError: naming the message, for what is no text, and for arguments that are no JSON.
    """
    return [_message(f"messages[{i}]", message) for i, message in enumerate(conversation)]


def _message(where: str, message: Message) -> dict[str, Any]:
    rendered = dict(message)
    content = rendered.get("content")
    if content is None:
        rendered["content"] = ""
    elif not isinstance(content, str):
        rendered["content"] = "".join(
            _text(f"{where}.content[{i}]", part) for i, part in enumerate(content)
        )
    if calls := rendered.get("tool_calls"):
        rendered["tool_calls"] = [_call(where, call) for call in calls]
    return rendered


def _text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise ValueError(f"{where} is of type {kind!r}; only parts of text are supported")
    return text


def _call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise ValueError(f"{where}.tool_calls: arguments are not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}
