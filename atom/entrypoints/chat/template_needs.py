"""What a chat template can write, found out by rendering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Calls that templates are asked to write, by what stands in every part of one.
_FIRST, _SECOND = "first_probe", "second_probe"
# How JSON and Python write an object with the key.
_KEYS = (f'"{_FIRST}":', f"'{_FIRST}':")
# What tools may lack.
PARTS_OF_TOOLS = {"description": "", "parameters": {"type": "object", "properties": {}}}
_HI = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class TemplateNeeds:
    """What messages and tools must be like for a template.

    Attributes:
        text_arguments: arguments of calls may be text, which is written as it is; otherwise they
            are objects. None where the template refuses text.
        no_calls, no_tools: it writes none.
        one_call: of several calls of a message it writes the first, or refuses them.
        text_or_thoughts: it refuses reasoning beside text in messages with calls.
        whole_tools: it refuses tools without description or parameters.
    """

    text_arguments: bool | None
    no_calls: bool
    no_tools: bool
    one_call: bool = False
    text_or_thoughts: bool = False
    whole_tools: bool = False


def find_needs(render: Callable[..., str]) -> TemplateNeeds:
    """Render small chats.

    Args:
        render: (messages, **variables) -> text; raises for what the template refuses.
    """
    attempt = _Attempt(render)
    written = attempt.writes(_arguments(_FIRST))
    objects = _Attempt(render, as_text=False)
    if written and not any(objects.writes(key) is not False for key in _KEYS):
        written = False  # an object's parameters stand in tags, as the model writes them
    calls = attempt if written else objects
    writes_calls = calls.writes(_FIRST)
    beside = calls.writes(_FIRST, content="text", reasoning_content="thought")
    return TemplateNeeds(
        text_arguments=written,
        no_calls=writes_calls is False,
        no_tools=attempt.writes_tool(**PARTS_OF_TOOLS) is False,
        one_call=writes_calls is True and not calls.writes(_SECOND, num_calls=2),
        text_or_thoughts=writes_calls is True and beside is None,
        whole_tools=attempt.writes_tool() is None,
    )


@dataclass(frozen=True)
class _Attempt:
    """Renders calls with their arguments as text or as an object."""

    render: Callable[..., str] = field(repr=False)
    as_text: bool = True

    def writes(self, text: str, num_calls: int = 1, **parts: str) -> bool | None:
        """Whether `text`, a part of a call, is written; None where the chat is refused."""
        calls = []
        for i, name in enumerate((_FIRST, _SECOND)[:num_calls]):
            arguments: Any = _arguments(name)
            function = {"name": name, "arguments": arguments if self.as_text else {name: 1}}
            calls.append({"id": f"functions.{name}:{i}", "type": "function", "function": function})
        answer = {"role": "assistant", "content": "", "tool_calls": calls, **parts}
        return self._renders(text, [_HI, answer])

    def writes_tool(self, **parts: Any) -> bool | None:
        tool = {"type": "function", "function": {"name": _FIRST, **parts}}
        return self._renders(_FIRST, [_HI], tools=[tool])

    def _renders(self, text: str, messages: list[Any], **variables: Any) -> bool | None:
        try:
            return text in self.render(messages, **variables)
        except Exception:  # a template is a program: anything can come out of it
            return None


def _arguments(key: str) -> str:
    """Text that no template writes of an object."""
    return f'{{"{key}":  1}}'
