"""Random schemas: what a grammar lets be written is valid, and a refusal names a keyword.

Texts are random walks, which go where no model would. `benchmarks/random_schemas.py` asks a model
for documents, of more schemas.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from atom import StructuredOutput
from atom.structured_output.base import Grammar
from atom.structured_output.xgrammar_backend import XGrammarBackend

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_SCHEMAS, NUM_DOCUMENTS = 120, 3
# A walk closes what is open from here on, as far as it may, and is given up after the second.
CLOSING, MOST = 25, 400
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def walk(backend: XGrammarBackend, grammar: Grammar, rng: np.random.Generator) -> bytes | None:
    """A complete text at random; None if it does not end."""
    tokens, stops = backend.vocabulary.tokens, backend.vocabulary.stop_token_ids
    closes = np.array([token[:1] in (b'"', b"}", b"]") for token in tokens])
    mask = np.zeros((1, -(-len(tokens) // 32)), dtype=np.int32)
    matcher, text = grammar.create_matcher(), b""
    for step in range(MOST):
        matcher.fill(mask, 0)
        allowed = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")[: len(tokens)] == 1
        assert allowed.any(), f"nothing may follow {text!r}"
        may_end = allowed[stops].any()
        allowed[stops] = False
        if may_end and (step > CLOSING or not allowed.any() or rng.random() < 0.5):
            return text
        if step > CLOSING and (allowed & closes).any():
            allowed &= closes
        token_id = int(rng.choice(np.flatnonzero(allowed)))
        assert matcher.accept(token_id), f"the mask allows {tokens[token_id]!r} after {text!r}"
        text += tokens[token_id]
    return None


def test_random_schemas_are_enforced_or_refused_by_name(
    backend: XGrammarBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("_random_schemas", None)
    from _random_schemas import keywords_of, random_schema

    counts = {"enforced": 0, "valid": 0}
    refusals: list[tuple[str, Any]] = []
    for seed in range(NUM_SCHEMAS):
        schema = random_schema(seed)
        shown = f"seed {seed}: {json.dumps(schema)}"
        try:
            wanted = StructuredOutput.json_schema(schema)
        except ValueError as error:
            refusals.append((str(error), schema))
            continue
        grammar = backend.compile(wanted)
        counts["enforced"] += 1
        validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        for document in range(NUM_DOCUMENTS):
            text = walk(backend, grammar, np.random.default_rng([seed, document]))
            if text is not None:
                assert validator.is_valid(json.loads(text)), (text, shown)
                counts["valid"] += 1
    for reason, schema in refusals:
        assert any(f"'{name}'" in reason for name in keywords_of(schema)), (reason, schema)
    assert min(len(refusals), *counts.values()) > NUM_SCHEMAS // 4, counts
