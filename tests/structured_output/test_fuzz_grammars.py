"""Damaged schemas and grammars: refused by name, or compiled in bounds of time and memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from fuzz.damage import damaged_json
from fuzz.judge import cases, judge

from atom import StructuredOutput
from atom.structured_output.base import GrammarError
from atom.structured_output.cache import GrammarCache
from atom.structured_output.trials.client import TrialProcess
from atom.structured_output.trials.compiler import TriedCompiler
from atom.structured_output.xgrammar_backend import XGrammarBackend

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "integer"}}},
    {"anyOf": [{"enum": ["a", 5, None]}, {"const": {"x": [1]}}, {"$ref": "#"}], "minLength": 2},
    {"type": "string", "pattern": "^(a|b){2,5}[0-9]+$", "format": "date"},
    {"type": "number", "minimum": 0, "maximum": 99, "multipleOf": 2},
)
REGEXES = ("[a-f]{3,9}-日本", "(a|b)*c?", "\\d{3}\\.\\w+", "^[^\\]x-z]+$", "(?:yes|no)\\s*")
EBNFS = (
    'root ::= "(" root ")" | "x"',
    'root ::= a (", " a)*\na ::= [a-z]{1,5} | b\nb ::= "\\"" [^"\\\\]* "\\""',
)
TAGS: tuple[Any, ...] = (
    {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "json_schema", "json_schema": {"type": "object"}},
        "end": "</a>",
    },
    {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "x"},
            {"type": "or", "elements": [{"type": "regex", "pattern": "a+"}, {"type": "any_text"}]},
        ],
    },
)
PIECES = (
    *'()[]{}|*+?^$\\.-,"\n#',
    *(
        "{0,99999}",
        "{9999}",
        "(a*)*",
        "[^",
        "\\p{L}",
        "\\u12",
        "(?=",
        "(?<n>",
        "\\1",
        "root",
        "::=",
    ),
    *("é", "\0", " ", "a", "[a-z]", "\\b", "((((", "|||"),
)


def damaged_text(text: str, choose: Random) -> str:
    """Some pieces are lost, doubled or put in."""
    for _ in range(choose.randint(1, 4)):
        start = choose.randrange(len(text) + 1)
        end = start + choose.choice([0, 0, 1, 2, 8])
        text = text[:start] + choose.choice([*PIECES, "", text[start:end] * 9]) + text[end:]
    return text


def damaged(seed: int) -> StructuredOutput:
    """Raises ValueError."""
    choose = Random(seed)
    match choose.randrange(8):
        case 0:
            return StructuredOutput.regex(damaged_text(choose.choice(REGEXES), choose))
        case 1:
            return StructuredOutput.ebnf(damaged_text(choose.choice(EBNFS), choose))
        case 2:
            return StructuredOutput.choice(damaged_json(["yes", "no", "é"], choose))
        case 3:
            return StructuredOutput.structural_tag(damaged_json(choose.choice(TAGS), choose))
        case 4:
            text = json.dumps(choose.choice(SCHEMAS))
            return StructuredOutput.json_schema(damaged_text(text, choose))
        case 5:
            from _random_schemas import random_schema

            return StructuredOutput.json_schema(damaged_json(random_schema(seed), choose))
        case _:
            return StructuredOutput.json_schema(damaged_json(choose.choice(SCHEMAS), choose))


@pytest.fixture(autouse=True)
def random_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("_random_schemas", None)


@pytest.mark.parametrize("seeds", cases(400, 20_000))
def test_checks_of_requests(seeds: range) -> None:
    """In the server's process, before anything is compiled."""
    judge(seeds, damaged, (ValueError,))


@pytest.mark.parametrize("seeds", cases(40, 4000))
def test_compiled(seeds: range, trials: TrialProcess, backend: XGrammarBackend) -> None:
    """As an engine does it: where a trial took its limits no more, here."""
    grammars = GrammarCache(TriedCompiler(lambda: backend, trials))
    mask = np.zeros((1, -(-len(backend.vocabulary.tokens) // 32)), dtype=np.int32)

    def read(seed: int) -> None:
        grammars.get(damaged(seed)).create_matcher().fill(mask, 0)
        assert mask.any()

    judge(seeds, read, (ValueError, GrammarError))
