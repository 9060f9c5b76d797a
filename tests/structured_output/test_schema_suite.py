"""The public JSON-Schema-Test-Suite (draft 2020-12): enforced or refused, and the docs say which.

Source: json-schema-org/JSON-Schema-Test-Suite, commit 44401e0, under the licence beside the data,
which holds of each schema its description, itself without `$schema`, and documents with whether
they are valid.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from atom import StructuredOutput
from atom.structured_output.base import Grammar, GrammarError
from atom.structured_output.state import is_allowed
from atom.structured_output.xgrammar_backend import XGrammarBackend

SUITE: dict[str, Any] = json.loads(
    (Path(__file__).parent / "suite" / "draft2020_12.json").read_text()
)
PAGE = Path(__file__).parents[2] / "docs" / "schemas.md"
HEAD = (
    "| Keyword | Schemas enforced | Schemas refused | Valid documents that can be written |\n"
    "| --- | ---: | ---: | ---: |\n"
)


def takes(backend: XGrammarBackend, grammar: Grammar, document: Any) -> bool:
    matcher = grammar.create_matcher()
    try:
        text = json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    if not matcher.accept_text(text):
        return False
    mask = np.zeros((1, -(-len(backend.vocabulary.tokens) // 32)), dtype=np.int32)
    matcher.fill(mask, 0)
    return is_allowed(mask, 0, backend.vocabulary.stop_token_ids[0])


def test_invalid_documents_cannot_be_written(backend: XGrammarBackend) -> None:
    table, wrong = HEAD, []
    for keyword, schemas in SUITE.items():
        enforced = refused = valid = written = 0
        for description, schema, documents in schemas:
            try:
                grammar = backend.compile(StructuredOutput.json_schema(schema))
            except (ValueError, GrammarError):
                refused += 1
                continue
            enforced += 1
            for document, is_valid in documents:
                is_taken = takes(backend, grammar, document)
                valid += is_valid
                written += is_taken and is_valid
                if is_taken and not is_valid:
                    wrong.append((keyword, description, document))
        share = f"{written} of {valid}" if enforced else ""
        table += f"| `{keyword}` | {enforced} | {refused} | {share} |\n"
    assert wrong == []
    assert table in PAGE.read_text(), f"docs/schemas.md must have the table\n{table}"
