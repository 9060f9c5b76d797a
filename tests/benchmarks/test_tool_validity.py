"""A part of the table of valid tool calls: what grammars guarantee of what chance writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def validity(benchmark_module: Callable[[str], Any]) -> Any:
    return benchmark_module("tool_validity")


@pytest.mark.parametrize("format_name", ["hermes", "kimi_k2", "kimi_k3", "qwen3_coder", "pythonic"])
def test_complete_calls_are_what_was_enforced(format_name: str, validity: Any) -> None:
    rows = {row["strictness"]: row for row in validity.by_chance([format_name], 8, 300)}
    for strictness in ("schemas", "forced"):
        row = rows[strictness]
        assert row["valid"] > 3, strictness
        assert row["valid"] + row.get("cut", 0) == row["calls"], strictness
    names = rows["names"]
    assert names.get("name", 0) == 0
    assert names["schema"] > 0, "chance alone obeys no schema"


def test_what_is_wrong_with_calls_is_told_apart(validity: Any) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "required": ["a"]}}
    request = validity.ToolRequest([{"type": "function", "function": tool}], "", 1)

    def kinds(*calls: str, end: str = "</tool_call>") -> dict[str, int]:
        text = "</tool_call>".join(f"<tool_call>{call}" for call in calls) + end
        return {k: n for k, n in validity.judge("hermes", request, text, "stop").items() if n}

    assert kinds('{"name": "f", "arguments": {"a": 1}}') == {"calls": 1, "valid": 1}
    assert kinds('{"name": "f", "arguments": {}}') == {"calls": 1, "schema": 1}
    assert kinds('{"name": "f", "arguments": {"a": nope}}') == {"calls": 1, "json": 1}
    assert kinds('{"name": "f", "arguments": {"a": "', end="") == {"calls": 1, "cut": 1}
    assert kinds('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": {') == {
        "calls": 2,
        "valid": 1,
        "json": 1,
    }
