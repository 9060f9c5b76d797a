"""Renders chat templates as transformers does, without importing it.

Templates are programs from checkpoints: they run in Jinja's sandbox and see plain data only.
Source of what they may use: transformers' `apply_chat_template`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.utils import Namespace

from atom.model_loader.tokenizers.bounded_templates import BoundedEnvironment, one_text

_END = "CONTINUE_FINAL_MESSAGE_TAG "
# What a message's thoughts are called; templates read the first, those of gpt-oss the second.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The text of a conversation.

    Args:
        continue_final_message: end where the last message's content ends.
        variables: further ones of the template.

    Raises:
        ValueError: for contradictory arguments, and where the template drops what to continue.
        TypeError: for what is no plain data.
        jinja2.TemplateError: when the template is wrong or refuses the messages.
    """
    if not messages:
        raise ValueError("an empty conversation cannot be rendered; give at least one message")
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "continue_final_message and add_generation_prompt contradict each other: one continues "
            "the last message, the other begins another"
        )
    chat = [_message(message) for message in messages]
    final = ""
    if continue_final_message:
        final = _mark_end(chat[-1], template)
    given = {"messages": chat, "tools": _plain(tools), "documents": _plain(documents)}
    try:
        with one_text():
            text = _compiled(template).render(
                **given, add_generation_prompt=add_generation_prompt, **_plain(variables)
            )
    except (RecursionError, MemoryError) as error:
        raise TemplateError(f"the template needs too much: {type(error).__name__}") from error
    return _cut(text, final) if continue_final_message else text


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None, and with its thoughts under all of their names."""
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is an object, not {type(message).__name__}")
    plain = {name: _plain(value) for name, value in message.items() if value is not None}
    thoughts = next((plain[name] for name in _THOUGHTS if name in plain), None)
    if thoughts is None:
        return plain
    return {"thinking": thoughts, **plain, "reasoning_content": thoughts}


def _mark_end(message: dict[str, Any], template: str) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError("continue_final_message: the last message has no text to continue")
    if "content" not in template:
        raise ValueError("continue_final_message: the template reads no content")
    message["content"] = content + _END
    return content


def _cut(text: str, final: str) -> str:
    end = text.rfind(_END.strip())
    if end < 0 or final.strip() not in text:
        raise ValueError(
            "continue_final_message: the template drops the last message, or a part of it"
        )
    kept = text[:end]
    # A template that trims messages trims the mark's space, and would have trimmed theirs.
    return kept if text.startswith(_END, end) else kept.rstrip()


def _plain(value: Any) -> Any:
    """A copy of JSON's types only, whose methods the sandbox knows."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    raise TypeError(f"chat templates take plain data, not {type(value).__name__}")


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.use_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)


class _Generation(Extension):
    """The tag around what a model wrote, which says nothing here."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's name and type

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without access to the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args  # a template may set an attribute `self`
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template cannot set {name!r}: names in a namespace begin otherwise")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, this leaves HTML's characters as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)
