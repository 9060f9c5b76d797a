"""Which grammars compile in a time that grows with their text alone, so that no trial is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from atom.structured_output.params import StructuredOutput

_MOST_CHARACTERS = 4 << 20
_MOST_DEPTH = 16
_MOST_PROPERTIES = 64
_MOST_LISTED = 256
# Of the parts of structural tags that are not schemas; others may be a user's.
_MOST_PATTERN = 64
_SHORT_COUNT = re.compile(r"\{[0-9](,[0-9]?)?\}")
_COUNT = re.compile(r"\{[0-9,]")
_MOST_REPEATS = 128
_TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
# They say nothing to the grammar.
_NOTES = {"title", "description", "default", "examples", "$schema"}
_PARTS = {
    "sequence", "or", "tag", "triggered_tags", "tags_with_separator", "const_string", "token",
    "token_triggered_tags", "any_text", "any_tokens", "optional", "star", "plus",
}  # fmt: skip


def is_plain(wanted: StructuredOutput) -> bool:
    """Whether schemas have only types, properties, items and short lists of values: no counts,
    patterns, combinations or references, which a few characters can make take hours.
    """
    if wanted.kind == "json_object":
        return True
    if len(wanted.value) > _MOST_CHARACTERS:
        return False
    if wanted.kind == "json_schema":
        return _is_plain_schema(json.loads(wanted.value), 0)
    return wanted.kind == "structural_tag" and _is_plain_part(json.loads(wanted.value), 0)


def _is_plain_part(part: Any, depth: int, is_repeated: bool = False) -> bool:
    """Of a structural tag."""
    if isinstance(part, list):
        return all(_is_plain_part(each, depth, is_repeated) for each in part)
    if not isinstance(part, Mapping):
        return True
    kind = part.get("type")
    if depth > _MOST_DEPTH:
        return False
    if kind == "json_schema":
        return _is_plain_schema(part.get("json_schema"), 0)
    if kind == "regex":
        pattern = str(part.get("pattern"))
        rest = _SHORT_COUNT.sub("", pattern, count=1)
        return len(pattern) <= _MOST_PATTERN and not _COUNT.search(rest)
    if kind == "repeat":
        if is_repeated or not isinstance(most := part.get("max"), int) or most > _MOST_REPEATS:
            return False
        is_repeated = True
    elif kind is not None and kind not in _PARTS:
        return False
    return all(_is_plain_part(each, depth + 1, is_repeated) for each in part.values())


def _is_plain_schema(schema: Any, depth: int) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
        return False
    return all(_is_plain_keyword(key, value, depth) for key, value in schema.items())


def _is_plain_keyword(key: str, value: Any, depth: int) -> bool:
    if key in _NOTES:
        return True
    if key == "type":
        return isinstance(value, str) and value in _TYPES
    if key == "enum":
        return isinstance(value, list) and len(value) <= _MOST_LISTED
    if key == "required":
        return isinstance(value, list)
    if key in ("items", "additionalProperties"):
        return _is_plain_schema(value, depth + 1)
    return (
        key == "properties"
        and isinstance(value, Mapping)
        and len(value) <= _MOST_PROPERTIES
        and all(_is_plain_schema(each, depth + 1) for each in value.values())
    )
