"""Grammars whose forced text has no end, or nearly none: drafts do not look for it."""

from __future__ import annotations

import math

import pytest

from atom import StructuredOutput
from atom.structured_output.forced_texts import longest_forced_text
from atom.structured_output.spelling import Spelling
from atom.structured_output.xgrammar_backend import MAX_FORCED_BYTES, XGrammarBackend

ENDLESS = [
    StructuredOutput.ebnf('root ::= "a" root'),
    StructuredOutput.ebnf('root ::= "b" | x\nx ::= "a" x'),
    StructuredOutput.ebnf('root ::= [ab] ((("a"{1000}){1000}){1000})?'),
    StructuredOutput.json_schema(
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"next": {"$ref": "#/$defs/node"}},
                    "required": ["next"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        }
    ),
]
SHORT = [
    StructuredOutput.json_object(),
    StructuredOutput.json_schema(
        {"type": "array", "items": {"enum": ["a|b", '")('], "type": "string"}}
    ),
    StructuredOutput.json_schema({"type": "string", "maxLength": 20}),
    StructuredOutput.regex(r'("[(|)=]"|\[\]\\){2,9}-日本'),
    StructuredOutput.ebnf('root ::= "(" root ")" | "x"{0,70000}'),
    StructuredOutput.choice(["yes", "no"]),
]


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('root ::= (("a" root))\n', math.inf),
        ('root ::= (("a" [b] [c]* x)) (=("long" "ahead"))\nx ::= ("" | ("no\\"t"))\n', 5),
        ("root ::= ((x{5, 9} x))\nx ::= ((y{0, 3} z))\ny ::= ((y))\nz ::= ([a-z])\n", math.inf),
        ("root ::= ((x{5, 9} x))\nx ::= (([a]))\n", 24),
        ('root ::= TagDispatch(\n  ("<", tag),\n  excludes=(")")\n)\ntag ::= (("end"))\n', 3),
    ],
)
def test_the_bound(grammar: str, expected: float) -> None:
    assert longest_forced_text(grammar) == expected


def test_a_text_too_long_for_a_float() -> None:
    doubling = "".join(f'r{i} ::= ((r{i + 1} r{i + 1} "c"))\n' for i in range(1100))
    grammar = f'root ::= ((r0 x) | ("x"))\nx ::= (("a" x))\n{doubling}r1100 ::= (("b"))\n'
    assert longest_forced_text(grammar) == math.inf


@pytest.mark.parametrize("wanted", ENDLESS)
def test_no_drafts_where_forced_texts_have_no_end(
    backend: XGrammarBackend, wanted: StructuredOutput
) -> None:
    assert spelling_backend(backend).compile(wanted).spelling is None


@pytest.mark.parametrize("wanted", SHORT)
def test_other_grammars_are_drafted(backend: XGrammarBackend, wanted: StructuredOutput) -> None:
    assert spelling_backend(backend).compile(wanted).spelling is not None


def test_long_texts_are_drafted_up_to_a_bound(backend: XGrammarBackend) -> None:
    drafting = spelling_backend(backend)
    for length, expected in ((MAX_FORCED_BYTES, True), (MAX_FORCED_BYTES + 1, False)):
        grammar = drafting.compile(StructuredOutput.ebnf(f'root ::= "a"{{{length}}}'))
        assert (grammar.spelling is not None) == expected


def spelling_backend(backend: XGrammarBackend) -> XGrammarBackend:
    tokens = backend.vocabulary.tokens
    return XGrammarBackend(backend.vocabulary, Spelling(tokens, lambda text: list(text.encode())))
