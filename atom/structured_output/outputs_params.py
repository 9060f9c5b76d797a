"""The constraint on a text as one of several arguments, as users of vLLM write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from atom.quoting import quote
from atom.structured_output.params import MAX_CHARACTERS, StructuredOutput


class StructuredOutputsParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Exactly one of these; `StructuredOutput` says what each means.

    Attributes:
        json: a JSON schema, as an object or as text.
        grammar: in GBNF notation, beginning at `root`.
        json_object: true for any JSON object.
        structural_tag: an xgrammar structural tag or its format, as an object or as text.

    Raises:
        ValueError: for none or several of them.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None

    def __post_init__(self) -> None:
        given = [n for n in self.__struct_fields__ if getattr(self, n) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs takes exactly one of {', '.join(self.__struct_fields__)}, "
                f"got {', '.join(given) or 'none'}"
            )

    def constraint(self) -> StructuredOutput:
        """Raises:
        ValueError: for a constraint that cannot be enforced.
        """
        if self.json is not None:
            return StructuredOutput.json_schema(self.json)
        if self.regex is not None:
            return StructuredOutput.regex(self.regex)
        if self.choice is not None:
            return StructuredOutput.choice(self.choice)
        if self.grammar is not None:
            return StructuredOutput.ebnf(self.grammar)
        if self.structural_tag is not None:
            return structural_tag(self.structural_tag)
        return StructuredOutput.json_object()


def structural_tag(value: Mapping[str, Any] | str) -> StructuredOutput:
    """The constraint of a structural tag, of its format, or of the tags that vLLM and SGLang took
    first: `structures`, each with `begin`, `schema` and `end`, which `triggers` begin.

    Raises:
        ValueError: for another value, or one that cannot be enforced.
    """
    try:
        tag = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the structural_tag is not JSON: {error}") from error
    if isinstance(tag, Mapping) and "structures" in tag:
        tag = _triggered(tag)
    elif isinstance(tag, Mapping) and "format" in tag:
        tag = tag["format"]
    if not isinstance(tag, Mapping):
        raise ValueError(f"structural_tag must be an object, got {quote(value)}")
    wanted = StructuredOutput.structural_tag(tag)
    if len(wanted.value) > MAX_CHARACTERS:
        raise ValueError(
            f"the structural_tag has {len(wanted.value)} characters, at most {MAX_CHARACTERS} are "
            "supported; make it smaller"
        )
    return wanted


def _triggered(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    structures = tag["structures"]
    needed = {"begin", "schema", "end"}
    if not isinstance(structures, list) or not all(
        isinstance(item, Mapping) and needed <= item.keys() for item in structures
    ):
        raise ValueError(f"structures must be objects with {', '.join(sorted(needed))}")
    tags = [
        {
            "type": "tag",
            "begin": item["begin"],
            "content": {"type": "json_schema", "json_schema": _schema(item["schema"])},
            "end": item["end"],
        }
        for item in structures
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _schema(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given
