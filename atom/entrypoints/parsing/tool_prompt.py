"""Chats with tools for templates that know none: the system message tells of them.

Calls and results of the history become text, spelled as the model is told to write calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from atom.entrypoints.parsing.tool_parsers import GENERIC, TOOL_PARSERS
from atom.structured_output.tags import Format, literal

Message = dict[str, Any]

_EXAMPLE = '{"argument": "value"}'


def tell_tools(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], parser: str
) -> list[Message]:
    """The messages with the tools in the system message."""
    text = _instructions(tools, parser)
    if messages[0]["role"] in ("system", "developer"):
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def tell_calls(messages: Sequence[Message], parser: str) -> list[Message]:
    """The messages with calls and results as their text."""
    return [_as_text(message, parser) for message in messages]


def spell_calls(calls: Sequence[tuple[str, str]], parser: str) -> str:
    """Calls, each a name and JSON text, as the format writes them."""
    grammar = TOOL_PARSERS[parser].grammar
    begin, end = grammar.section or ("", "")
    text = grammar.separator.join(_text(grammar.call(name, literal(a))) for name, a in calls)
    return "".join((begin, _text(grammar.head), text, _text(grammar.tail), end))


def _instructions(tools: Sequence[dict[str, Any]], parser: str) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    lines = ["You can call these functions:", f"<tools>\n{listed}\n</tools>"]
    if TOOL_PARSERS[parser].grammar.takes_json:
        lines.append("To call one, answer with its name and arguments in this form alone:")
        lines.append(spell_calls([("function_name", _EXAMPLE)], parser))
    return "\n".join([*lines, "Answer in plain text when no function is needed."])


def _as_text(message: Message, parser: str) -> Message:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    if not message.get("tool_calls"):
        return message
    calls = [_name_and_arguments(call["function"]) for call in message["tool_calls"]]
    spelled = spell_calls(calls, parser if TOOL_PARSERS[parser].grammar.takes_json else GENERIC)
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (message["content"], spelled)))}


def _name_and_arguments(function: dict[str, Any]) -> tuple[str, str]:
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return str(function.get("name", "")), arguments


def _text(format: Format | None) -> str:
    """The first text of a format; a pattern stands for a number, what is optional is left out."""
    if format is None or format["type"] == "optional":
        return ""
    if format["type"] == "tag":
        return _text(format["begin"]) + _text(format["content"]) + _text(format["end"])
    if format["type"] == "sequence":
        return "".join(map(_text, format["elements"]))
    if format["type"] == "or":
        return _text(format["elements"][0])
    if format["type"] == "regex":
        return "0"
    return str(format["token"] if format["type"] == "token" else format["value"])
