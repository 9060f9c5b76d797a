"""`StructuredOutput`: the constraint of a request's text that a grammar enforces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec

from atom.structured_output.schema.json_schema import check_schema
from atom.structured_output.schema.patterns import PatternError, text_rule

Kind = Literal["json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag"]

# Grammars of this size compile in about a second; much longer ones take minutes.
MAX_CHARACTERS = 65536
# Of structural tags, which have the schemas of all tools; what users send is smaller.
MAX_TAG_CHARACTERS = 64 << 20
MAX_CHOICES = 4096


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the generated text; create it with the class methods.

    Construction checks what can be checked without compiling; other errors are reported when the
    request is submitted.

    Attributes:
        kind: how to interpret `value`.
        value: a JSON schema, a list of choices or a structural tag's format, as JSON text; a
            regular expression; or an EBNF grammar with the start rule `root`. Empty for
            `json_object`.
        starts_after: the constraint begins after this marker, such as the end of a reasoning
            section, and the text up to it is free. None to begin at once.
        opens_with: the marker that begins that free text, if the model writes any; None where it
            has begun.

    Raises:
        ValueError: for a constraint that is too large, malformed, or cannot be enforced.
    """

    kind: Kind
    value: str = ""
    starts_after: str | None = None
    opens_with: str | None = None

    def __post_init__(self) -> None:
        most = MAX_TAG_CHARACTERS if self.kind == "structural_tag" else MAX_CHARACTERS
        if len(self.value) > most:
            raise ValueError(
                f"structured_output: the {self.kind} has {len(self.value)} characters, at most "
                f"{most} are supported; make it smaller"
            )
        if self.starts_after == "":
            raise ValueError("structured_output: starts_after must not be empty")
        if self.opens_with is not None and not (self.opens_with and self.starts_after):
            raise ValueError("structured_output: opens_with needs starts_after, and a text")
        try:
            (self.value + (self.starts_after or "")).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"structured_output: not valid Unicode: {error}") from error
        _check_value(self.kind, self.value)

    @classmethod
    def json_object(cls) -> StructuredOutput:
        """Any JSON object."""
        return cls(kind="json_object")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> StructuredOutput:
        """A JSON document that is valid under `schema`, an object or its JSON text."""
        text = schema if isinstance(schema, str) else _dump(schema)
        return cls(kind="json_schema", value=text)

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        """A text that the pattern matches as a whole."""
        return cls(kind="regex", value=pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> StructuredOutput:
        """One of the texts."""
        return cls(kind="choice", value=_dump(choices))

    @classmethod
    def ebnf(cls, grammar: str) -> StructuredOutput:
        """A text of the grammar, in llama.cpp's GBNF notation, starting with `root`."""
        return cls(kind="ebnf", value=grammar)

    @classmethod
    def structural_tag(cls, format: Mapping[str, Any]) -> StructuredOutput:
        """Free text with constrained parts; `format` is that of an xgrammar structural tag."""
        return cls(kind="structural_tag", value=_dump(format))


# Agents send the same tools with every turn, and the engine's process reads them anew.
@lru_cache(maxsize=128)
def _check_value(kind: Kind, value: str) -> None:
    _CHECKS[kind](value)


def _dump(value: Any) -> str:
    """JSON text that keeps the order of keys, in which properties are generated."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_output: not JSON: {error}") from error


def _load(kind: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured_output: the {kind} is not JSON: {error}") from error


def _check_empty(value: str) -> None:
    if value:
        raise ValueError(f"structured_output: json_object takes no value, got {value!r}")


def _check_schema(value: str) -> None:
    _check_one_schema(_load("json_schema", value))


def _check_one_schema(schema: Any) -> None:
    try:
        check_schema(schema)
    except ValueError as error:
        raise ValueError(f"structured_output: {error}") from error


def _check_text(value: str) -> None:
    if not value:
        raise ValueError("structured_output: the pattern or grammar is empty")


def _check_pattern(value: str) -> None:
    _check_text(value)
    try:
        text_rule(value)
    except PatternError as error:
        raise ValueError(f"structured_output: the regex: {error}") from error


def _check_choices(value: str) -> None:
    choices = _load("choice", value)
    if not isinstance(choices, list) or not all(type(c) is str and c for c in choices):
        raise ValueError("structured_output: choice must be a list of non-empty strings")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(
            f"structured_output: choice must hold 1 to {MAX_CHOICES} strings, got {len(choices)}"
        )


def _check_tag(value: str) -> None:
    tag = _load("structural_tag", value)
    if not isinstance(tag, dict):
        raise ValueError("structured_output: a structural_tag's format must be an object")
    for part in _parts(tag):
        _check_part(part)
        if part.get("type") == "json_schema":
            _check_one_schema(part.get("json_schema"))
        elif part.get("type") == "regex":
            pattern = part.get("pattern")
            if not isinstance(pattern, str):
                raise ValueError(f"structured_output: a regex is a string, got {pattern!r}")
            _check_pattern(pattern)


def _check_part(part: dict[str, Any]) -> None:
    """What is looked at before the library sees it."""
    kind = part.get("type", "")
    if not isinstance(kind, str):
        raise ValueError(f"structured_output: a structural_tag's type is a string, got {kind!r}")
    tokens = {name: part.get(name, []) for name in ("trigger_tokens", "exclude_tokens")}
    if kind == "token":
        tokens["token"] = [part.get("token")]
    if kind == "token_triggered_tags" and "trigger_tokens" not in part:
        raise ValueError(f"structured_output: a structural_tag's {kind} needs trigger_tokens")
    for side in ("begin", "end"):
        if kind == "tag" and isinstance(part.get(side), dict):
            tokens[side] = [part[side].get("token")]
    for name, given in tokens.items():
        if not isinstance(given, list) or not all(type(item) in (str, int) for item in given):
            raise ValueError(
                f"structured_output: {name} of a structural_tag is of tokens, by text or id, "
                f"got {given!r}"
            )


def _parts(format: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A format and all nested formats, except within schemas."""
    pending: list[Any] = [format]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield item
            pending += [value for key, value in item.items() if key != "json_schema"]
        elif isinstance(item, list):
            pending += item


_CHECKS = {
    "json_object": _check_empty,
    "json_schema": _check_schema,
    "regex": _check_pattern,
    "choice": _check_choices,
    "ebnf": _check_text,
    "structural_tag": _check_tag,
}
