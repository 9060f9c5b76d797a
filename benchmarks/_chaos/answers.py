"""What an answer says: all of it but what differs between two runs of the same request.

Left out are ids, dates and durations, what the prefix cache served, and where a stream was cut into
chunks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_VOLATILE = frozenset(
    (
        "id",
        "created",
        "created_at",
        "completed_at",
        "request_id",
        "call_id",
        "e2e_latency",
        "cached_tokens",
        "prompt_tokens_details",
        "input_tokens_details",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
        "input_tokens",
        "system_fingerprint",
    )
)


class IncompleteError(Exception):
    """The answer does not claim to be complete; the message has the error that it ends with."""


def said_by(path: str, body: bytes, *, stream: bool) -> Any:
    """The content of a complete answer, alike in every run of the request.

    Raises:
        IncompleteError: when the answer says that it failed, or was cut.
        ValueError: when it is not what its API promises.
    """
    if not stream:
        return _stable(json.loads(body))
    text = body.decode()
    if text and not text.endswith("\n\n"):
        raise IncompleteError("cut within an event")
    events = [_data(event) for event in text.split("\n\n") if event.strip()]
    for event in events:
        if isinstance(event, dict) and (event.get("type") in _FAILED or event.get("error")):
            raise IncompleteError(json.dumps(event))
    if not events or not _is_end(path, events[-1]):
        raise IncompleteError("cut between two events")
    return _stable(_FOLDS[path](events))


_FAILED = ("error", "response.failed")


def _data(event: str) -> Any:
    lines = [line[5:].strip() for line in event.split("\n") if line.startswith("data:")]
    data = "\n".join(lines)
    return data if data == "[DONE]" else json.loads(data)


def _is_end(path: str, last: Any) -> bool:
    if path == "/v1/responses":
        return last["type"] in ("response.completed", "response.incomplete")
    if path == "/v1/messages":
        return bool(last["type"] == "message_stop")
    return bool(last == "[DONE]")


def _fold_choices(events: list[Any]) -> Any:
    """Of completions and chats: everything that each choice says, joined."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            into = choices.setdefault(choice["index"], {})
            _merge(into, {k: v for k, v in choice.items() if k != "index"})
    return sorted(choices.items())


_REPLACED = ("index", "role", "type", "name", "finish_reason", "stop_reason")


def _merge(into: dict[str, Any], piece: dict[str, Any]) -> None:
    for name, value in piece.items():
        if value is None:
            continue
        if name == "tool_calls":
            calls = into.setdefault(name, {})
            for call in value:
                _merge(calls.setdefault(str(call["index"]), {}), call)
        elif isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        elif name in _REPLACED or into.get(name) is None:
            into[name] = value
        else:
            into[name] += value


def _fold_responses(events: list[Any]) -> Any:
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            key = f"{event['output_index']} {event['type']}"
            deltas[key] = deltas.get(key, "") + event["delta"]
    return [deltas, events[-1]["response"]]


def _fold_messages(events: list[Any]) -> Any:
    blocks: dict[int, dict[str, Any]] = {}
    ends = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta":
                delta = {k: v for k, v in event["delta"].items() if k != "type"}
                _merge(blocks[event["index"]], delta)
            case "message_delta":
                ends.append(event)
    return [sorted(blocks.items()), ends]


_FOLDS: dict[str, Callable[[list[Any]], Any]] = {
    "/v1/completions": _fold_choices,
    "/v1/chat/completions": _fold_choices,
    "/v1/responses": _fold_responses,
    "/v1/messages": _fold_messages,
    # Each event has all the text so far; those of several choices alternate.
    "/generate": lambda events: events[-2],
}


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _stable(v) for k, v in value.items() if k not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_stable(v) for v in value]
    return value
