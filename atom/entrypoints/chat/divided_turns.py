"""Histories for templates that write one call of a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The messages with each call in one of its own, before its results.

    What else the message says stands with the first. A result is of the call that it names, else of
    the one in its place.
    """
    return [part for turn in _turns(messages) for part in _divided(turn)]


def _turns(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Each message with the results of tools that follow it."""
    turn: list[Message] = []
    for message in messages:
        if message["role"] != "tool" and turn:
            yield turn
            turn = []
        turn.append(message)
    if turn:
        yield turn


def _divided(turn: list[Message]) -> Iterator[Message]:
    first, *results = turn
    calls = first.get("tool_calls") or ()
    if len(calls) < 2:
        yield from turn
        return
    ids = [call.get("id") for call in calls]
    of_calls: list[list[Message]] = [[] for _ in calls]
    for place, result in enumerate(results):
        named = result.get("tool_call_id")
        index = ids.index(named) if named is not None and named in ids else place
        of_calls[min(index, len(calls) - 1)].append(result)
    others = {"role": first["role"], "content": ""}
    for index, (call, of_call) in enumerate(zip(calls, of_calls, strict=True)):
        yield {**(others if index else first), "tool_calls": [call]}
        yield from of_call
