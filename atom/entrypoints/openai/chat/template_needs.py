"""What a chat template can write, found out by rendering."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_NAME = "probe_of_calls"
_SECOND = "probe_of_more"
_ARGUMENTS = '{"probe":  1}'
_KEY = '"probe":'
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
    written = attempt.writes(_ARGUMENTS)
    if written and _Attempt(render, as_text=False).writes(_KEY) is False:
        written = False  # an object's parameters stand in tags, as the model writes them
    calls = _Attempt(render, as_text=written is True)
    writes_calls = calls.writes(_NAME)
    beside = calls.writes(_NAME, content="text", reasoning_content="thought")
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
        arguments = _ARGUMENTS if self.as_text else json.loads(_ARGUMENTS)
        calls = [
            {
                "id": f"functions.{name}:{i}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, name in enumerate((_NAME, _SECOND)[:num_calls])
        ]
        answer = {"role": "assistant", "content": "", "tool_calls": calls, **parts}
        return self._renders(text, [_HI, answer])

    def writes_tool(self, **parts: Any) -> bool | None:
        tool = {"type": "function", "function": {"name": _NAME, **parts}}
        return self._renders(_NAME, [_HI], tools=[tool])

    def _renders(self, text: str, messages: list[Any], **variables: Any) -> bool | None:
        try:
            return text in self.render(messages, **variables)
        except Exception:  # a template is a program: anything can come out of it
            return None
