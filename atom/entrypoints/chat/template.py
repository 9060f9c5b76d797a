"""Conversations as a model reads them: the one way from messages to a prompt, for every API.

Clients replay what they were answered, cut wherever a limit fell, and what other servers answered.
All of it is taken: a call whose arguments are no JSON object reaches the template as text, or
without arguments where the template takes no text; a tool's result or an assistant's turn without
content is empty; half a surrogate pair becomes U+FFFD.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from atom.entrypoints.chat.image_marks import order_of, parts_of
from atom.entrypoints.parsing.reasoning import REASONING_PARSERS
from atom.entrypoints.parsing.reasoning.formats import ThinkTags
from atom.entrypoints.parsing.tool_parsers import GENERIC
from atom.entrypoints.parsing.tool_prompt import tell_calls, tell_tools
from atom.entrypoints.parsing.typescript_tools import VARIABLE, declare_tools, sort_keys
from atom.quoting import excerpt
from atom.text.control_tokens import ControlTokens

# Histories for templates that write one call of a message.


def one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each call in one of its own, before its results.

    What else the message says stands with the first. A result is of the call that it names, else of
    the one in its place.
    """
    return [part for turn in _turns(messages) for part in _divided(turn)]


def _turns(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Each message with the results of tools that follow it."""
    turn: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool" and turn:
            yield turn
            turn = []
        turn.append(message)
    if turn:
        yield turn


def _divided(turn: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    first, *results = turn
    calls = first.get("tool_calls") or ()
    if len(calls) < 2:
        yield from turn
        return
    ids = [call.get("id") for call in calls]
    of_calls: list[list[dict[str, Any]]] = [[] for _ in calls]
    for place, result in enumerate(results):
        named = result.get("tool_call_id")
        index = ids.index(named) if named is not None and named in ids else place
        of_calls[min(index, len(calls) - 1)].append(result)
    others = {"role": first["role"], "content": ""}
    for index, (call, of_call) in enumerate(zip(calls, of_calls, strict=True)):
        yield {**(others if index else first), "tool_calls": [call]}
        yield from of_call


# What a chat template can write, found out by rendering.

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
        parts: it writes contents that are lists of parts, and no text.
    """

    text_arguments: bool | None
    no_calls: bool
    no_tools: bool
    one_call: bool = False
    text_or_thoughts: bool = False
    whole_tools: bool = False
    parts: bool = False


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
        parts=not attempt.writes_content(_FIRST)
        and attempt.writes_content([{"type": "text", "text": _FIRST}]) is True,
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

    def writes_content(self, content: Any) -> bool | None:
        return self._renders(_FIRST, [{"role": "user", "content": content}])

    def _renders(self, text: str, messages: list[Any], **variables: Any) -> bool | None:
        try:
            return text in self.render(messages, **variables)
        except Exception:  # a template is a program: anything can come out of it
            return None


def _arguments(key: str) -> str:
    """Text that no template writes of an object."""
    return f'{{"{key}":  1}}'


logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

# The tokenizers that come with such a template sort the keys of tools.
_KIMI = "<|im_system|>tool_declare<|im_middle|>"
# Whose messages may lack content.
_SILENT_ROLES = ("assistant", "tool")
# The tags of thoughts that an answer may hold.
_THOUGHTS = dict.fromkeys(
    (format.open, format.close)
    for format in REASONING_PARSERS.values()
    if isinstance(format, ThinkTags) and not format.special_tokens
)
# Types of parts, which are the names of their texts, too.
_KINDS_OF_TEXT = ("text", "refusal")


class MessageError(ValueError):
    """A message that no template can be given.

    Attributes:
        where: its name, as `messages[3].content`.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}{problem}")
        self.where = where


class ChatTemplate:
    """A chat template, and what it knows.

    Args:
        tool_format: how tools and calls are told where the template knows none.
    """

    def __init__(self, tokenizer: Any, text: str, tool_format: str = GENERIC) -> None:
        self.text = text
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._control_tokens = ControlTokens(tokenizer, text)
        self._thoughts = [tags for tags in _THOUGHTS if self._control_tokens.mark(tags) != [*tags]]
        self._needs = find_needs(
            functools.partial(tokenizer.apply_chat_template, chat_template=text, tokenize=False)
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None = None,
        *,
        loads: Callable[[str], Any] = json.loads,
        sanitizes: bool = False,
    ) -> str:
        """The text of a conversation; see `render_images`."""
        return self.render_images(messages, tools, variables, loads=loads, sanitizes=sanitizes)[0]

    def render_images(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None = None,
        *,
        loads: Callable[[str], Any] = json.loads,
        sanitizes: bool = False,
    ) -> tuple[str, list[int]]:
        """The text of a conversation, and the numbers of the images in it, in their order.

        Args:
            messages: as OpenAI's API has them, contents being text or parts of text; in the text
                marks stand for images (`image_marks.mark_of`).
            variables: further arguments of `apply_chat_template`.
            loads: parses the arguments of calls.
            sanitizes: control tokens that messages, tools and variables spell are marked, for
                `ControlTokens.encode`; those of an assistant's own thoughts are not.

        Raises:
            MessageError: for a message that no template can be given.
            Exception: whatever the template raises.
        """
        told = [self._message(f"messages[{i}]", m, loads) for i, m in enumerate(messages)]
        described = [self._tool(tool) for tool in tools or ()]
        variables = variables or {}
        if sanitizes:
            told = [self._mark(message) for message in told]
            described, variables = self._control_tokens.mark([described, variables])
        if self._needs.no_calls:
            told = tell_calls(told, self._tool_format)
        if self._needs.one_call:
            told = one_call_each(told)
        if described and self._needs.no_tools:
            told = tell_tools(told, described, self._tool_format)
        if described and _KIMI in self.text:
            described = sort_keys(described)
            variables = {**self._typescript(described), **variables}
        order = order_of(told)
        if self._needs.parts or order:
            told = [self._in_parts(message) for message in told]
        text: str = self._tokenizer.apply_chat_template(
            told, tools=described or None, chat_template=self.text, tokenize=False, **variables
        )
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), order

    def _in_parts(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message with its content in parts, where it has images or the template needs them."""
        parts = parts_of(message["content"])
        is_text = all(part["type"] == "text" for part in parts)
        return message if is_text and not self._needs.parts else {**message, "content": parts}

    def _typescript(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """The template's variable with the tools in TypeScript; none for those told as JSON."""
        if VARIABLE not in self.text:
            return {}
        try:
            return {VARIABLE: declare_tools(tools)}
        except ValueError as error:
            logger.info("the tools are told as JSON: %s", excerpt(str(error)))
            return {}

    def check_syntax(self) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        try:
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": ""}], chat_template=self.text, tokenize=False
            )
        except jinja2.TemplateSyntaxError:
            raise
        except Exception:
            return  # the template may well refuse this particular chat

    def _mark(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message with its control tokens marked."""
        mark = self._control_tokens.mark
        marked: dict[str, Any] = mark(message)
        if message["role"] != "assistant":
            return marked
        # Templates look for thoughts in an answer; only where they belong are they the model's.
        content = message["content"]
        for opens, closes in self._thoughts:
            thoughts, end, rest = content.partition(closes)
            begin = opens if thoughts.startswith(opens) else ""
            if begin or end:
                inner = mark(thoughts.removeprefix(begin))
                return marked | {"content": f"{begin}{inner}{end}{mark(rest)}"}
        return marked

    def _message(self, where: str, message: Message, loads: Callable[[str], Any]) -> dict[str, Any]:
        """What templates expect: contents as text, arguments as this one takes them."""
        if not isinstance(message, Mapping):
            raise MessageError(where, f" is of type {type(message).__name__!r}, not an object")
        told = {name: value for name, value in message.items() if value is not None}
        if "role" not in told:
            raise MessageError(f"{where}.role", " is missing")
        if told.get("role") == "developer" and "developer" not in self.text:
            told["role"] = "system"
        # A refusal stands where the answer would.
        told["content"] = _content(where, message) + told.pop("refusal", "")
        if calls := told.pop("tool_calls", None):
            if not isinstance(calls, (list, tuple)):
                raise MessageError(f"{where}.tool_calls", " are not a list")
            told["tool_calls"] = [self._call(where, call, loads) for call in calls]
            if self._needs.text_or_thoughts and told.get("reasoning_content"):
                thoughts = filter(None, (told["reasoning_content"], told["content"]))
                told |= {"reasoning_content": "\n\n".join(thoughts), "content": ""}
        return told

    def _tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """A tool with what this template needs of it."""
        if not self._needs.whole_tools:
            return dict(tool)
        return {**tool, "function": {**PARTS_OF_TOOLS, **tool["function"]}}

    def _call(self, where: str, call: Any, loads: Callable[[str], Any]) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise MessageError(where, ".tool_calls need a 'function' object")
        arguments = function.get("arguments")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = "{}"
        if isinstance(arguments, str) and not self._needs.text_arguments:
            arguments = self._as_object(arguments, loads)
        return {**call, "function": {**function, "arguments": arguments}}

    def _as_object(self, arguments: str, loads: Callable[[str], Any]) -> Any:
        try:
            value = loads(arguments)
        except ValueError:
            value = None
        if isinstance(value, dict):
            return value
        return {} if self._needs.text_arguments is None else arguments


class ChatTemplates:
    """A model's chat template, or its several ones by name: with tools the one named `tool_use`
    is meant, if there is one, else `default`. Source: transformers.

    Args:
        given: instead of the tokenizer's, or the name of one of these.
    """

    def __init__(
        self, tokenizer: Any, given: str | None = None, *, tool_format: str = GENERIC
    ) -> None:
        own = tokenizer.chat_template
        texts: dict[str, str] = own if isinstance(own, dict) else {"default": own}
        self._texts = texts if given is None else {"default": texts.get(given, given)}
        self._template = functools.cache(
            lambda text: ChatTemplate(tokenizer, text, tool_format=tool_format)
        )

    @property
    def default(self) -> str | None:
        """The text of the template of chats without tools; None if there is none."""
        return self._texts.get("default")

    def choose(self, *, with_tools: bool) -> ChatTemplate | None:
        text = (self._texts.get("tool_use") if with_tools else None) or self.default
        return None if text is None else self._template(text)


def _content(where: str, message: Message) -> str:
    content = message.get("content")
    if content is None:
        if message.get("role") in _SILENT_ROLES:
            return ""
        raise MessageError(f"{where}.content", " is missing")
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        kind = type(content).__name__
        raise MessageError(f"{where}.content", f" is of type {kind!r}; it is text or parts of text")
    return "".join(_text(f"{where}.content[{i}]", part) for i, part in enumerate(content))


def _text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(kind) if isinstance(part, Mapping) and kind in _KINDS_OF_TEXT else None
    if not isinstance(text, str):
        raise MessageError(where, f" is of type {kind!r}; only parts of text are supported")
    return text
