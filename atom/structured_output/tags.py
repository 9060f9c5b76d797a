"""Converts every kind of constraint to a structural tag format, xgrammar's most general notation.

Described at https://xgrammar.mlc.ai/docs/structural_tag/structural_tag.html.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atom.structured_output.params import StructuredOutput

Format = dict[str, Any]

# What models write between their thoughts and an answer.
_BLANK = {"type": "regex", "pattern": "\\n{0,2}"}
ANY_OBJECT = {"type": "object", "additionalProperties": True}


def token(text: str) -> Format:
    """A marker: the token with this text if the vocabulary has one, else the text."""
    return {"type": "token", "token": text}


def literal(text: str) -> Format:
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def one_of(formats: list[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def json_document(schema: Mapping[str, Any] | bool, whitespace: int | None = None) -> Format:
    """A document in a usual layout: on one line, or on lines that are indented.

    Args:
        whitespace: instead at most so many characters of white space between two tokens.
    """
    format = {"type": "json_schema", "json_schema": schema}
    return format if whitespace is None else {**format, "max_whitespace_cnt": whitespace}


def after(
    marker: str, format: Format, excluded: Sequence[str] = (), opens_with: str | None = None
) -> Format:
    """Free text up to and including a marker, without the `excluded` markers; then the format.

    Args:
        opens_with: the marker that begins the free text, if there is any; None where it has begun.
    """
    free = {"type": "any_tokens", "exclude_tokens": [marker, *excluded]}
    begin: Format | str = "" if opens_with is None else token(opens_with)
    thought: Format = {"type": "tag", "begin": begin, "content": free, "end": token(marker)}
    if opens_with is not None:
        thought = {"type": "optional", "content": sequence(thought, _BLANK)}
    return sequence(thought, format)


def as_format(wanted: StructuredOutput) -> Format:
    """The constraint as a format; markers are still texts."""
    format = _FORMATS[wanted.kind](wanted.value)
    if wanted.starts_after is None:
        return format
    return after(wanted.starts_after, format, opens_with=wanted.opens_with)


def lower_tokens(format: Any, markers: Mapping[str, int]) -> Any:
    """Replace marker tokens by their ids; markers that are not tokens become plain text, or tokens
    and text where they hold tokens.

    If free text ends at a token, only tokens can be excluded from it.

    Args:
        markers: token ids of the markers in the vocabulary.
    """
    if isinstance(format, list):
        return [lower_tokens(item, markers) for item in format]
    if not isinstance(format, dict):
        return format
    rule = _RULES.get(format.get("type"))
    if rule is not None:
        format = rule(format, markers)
    return {
        key: value if key == "json_schema" else lower_tokens(value, markers)
        for key, value in format.items()
    }


def _lower_token(format: Format, markers: Mapping[str, int]) -> Format:
    text = format["token"]
    if not isinstance(text, str):
        return format
    parts = [_part(part, markers) for part in _parts(text, markers)]
    return parts[0] if len(parts) == 1 else sequence(*parts)


def _lower_tag(format: Format, markers: Mapping[str, int]) -> Format:
    """The ends of a tag are strings or tokens; with one that is more, it is a sequence."""
    if not {"begin", "content", "end"} <= format.keys():
        return format  # the library says what is missing
    sides = [format[side] for side in ("begin", "end")]
    if any(len(_parts(side["token"], markers)) > 1 for side in sides if isinstance(side, dict)):
        begin, end = (side if isinstance(side, dict) else literal(side) for side in sides)
        return sequence(begin, format["content"], end)
    return {
        **format,
        **{side: _plain(format[side], markers) for side in ("begin", "end") if side in format},
    }


def _parts(text: Any, markers: Mapping[str, int]) -> list[str]:
    """A marker's tokens, and the text between them."""
    if not isinstance(text, str) or text in markers:
        return [text]
    held = sorted((m for m in markers if m in text), key=len, reverse=True)
    if not held:
        return [text]
    pattern = "|".join(map(re.escape, held))
    return [part for part in re.split(f"({pattern})", text) if part]


def _part(text: str, markers: Mapping[str, int]) -> Format:
    return {"type": "token", "token": markers[text]} if text in markers else literal(text)


def _plain(end: Any, markers: Mapping[str, int]) -> Any:
    is_text = isinstance(end, dict) and end.get("token") not in markers
    return end["token"] if is_text and isinstance(end.get("token"), str) else end


def _lower_any_tokens(format: Format, markers: Mapping[str, int]) -> Format:
    items = format.get("exclude_tokens", [])
    firsts = [_parts(item, markers)[0] for item in items]
    known = [
        markers.get(first, item) if isinstance(first, str) else first
        for first, item in zip(firsts, items, strict=True)
    ]
    if known and isinstance(known[0], str):
        return {"type": "any_text", "excludes": [item for item in items if isinstance(item, str)]}
    tokens = dict.fromkeys(item for item in known if not isinstance(item, str))
    return {**format, "exclude_tokens": list(tokens)}


def _lower_triggered(format: Format, markers: Mapping[str, int]) -> Format:
    triggers = format["trigger_tokens"]
    excluded = format.get("exclude_tokens", [])
    if all(item in markers or not isinstance(item, str) for item in triggers):
        known = [markers.get(item, item) for item in excluded]
        return {
            **format,
            "trigger_tokens": [markers.get(item, item) for item in triggers],
            "exclude_tokens": [item for item in known if not isinstance(item, str)],
        }
    lowered = {k: v for k, v in format.items() if k not in ("trigger_tokens", "exclude_tokens")}
    return {
        **lowered,
        "type": "triggered_tags",
        "triggers": triggers,
        "excludes": [item for item in excluded if isinstance(item, str) and item not in markers],
    }


_RULES: dict[Any, Callable[[Format, Mapping[str, int]], Format]] = {
    "token": _lower_token,
    "tag": _lower_tag,
    "any_tokens": _lower_any_tokens,
    "token_triggered_tags": _lower_triggered,
}

_FORMATS: dict[str, Callable[[str], Format]] = {
    "json_object": lambda _: json_document(ANY_OBJECT),
    "json_schema": lambda text: json_document(json.loads(text)),
    "regex": lambda pattern: {"type": "regex", "pattern": pattern},
    "choice": lambda text: {"type": "or", "elements": [literal(c) for c in json.loads(text)]},
    "ebnf": lambda grammar: {"type": "grammar", "grammar": grammar},
    "structural_tag": json.loads,
}
