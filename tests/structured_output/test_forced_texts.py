"""Grammars whose forced text has no end, or nearly none: drafts do not look for it."""

from __future__ import annotations

import math

import pytest

from atom import StructuredOutput
from atom.structured_output.base import GrammarError
from atom.structured_output.forced_texts import TextLengths, text_lengths
from atom.structured_output.spelling import Spelling
from atom.structured_output.xgrammar_backend import MAX_FORCED_BYTES, XGrammarBackend

ENDLESS = [
    StructuredOutput.ebnf('root ::= "b" | x\nx ::= "a" x'),
    StructuredOutput.ebnf('root ::= [ab] ((("a"{1000}){1000}){1000})?'),
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
        ('root ::= (("a" ("b" | "ccc") ("ddddd")))\n', 7),
        ('root ::= TagDispatch(\n  ("<", tag),\n  excludes=(")")\n)\ntag ::= (("end"))\n', 3),
    ],
)
def test_the_bound(grammar: str, expected: float) -> None:
    assert text_lengths(grammar).forced == expected


def test_a_text_too_long_for_a_float() -> None:
    doubling = "".join(f'r{i} ::= ((r{i + 1} r{i + 1} "c"))\n' for i in range(1100))
    grammar = f'root ::= ((r0 x) | ("x"))\nx ::= (("a" x))\n{doubling}r1100 ::= (("b"))\n'
    assert text_lengths(grammar) == TextLengths(math.inf, 1)


@pytest.mark.parametrize("wanted", ENDLESS)
def test_no_drafts_where_forced_texts_have_no_end(
    backend: XGrammarBackend, wanted: StructuredOutput
) -> None:
    assert spelling_backend(backend).compile(wanted).spelling is None


NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}},
    "required": ["next"],
    "additionalProperties": False,
}
_CALL = {"type": "json_schema", "json_schema": {"$ref": "#/$defs/node", "$defs": {"node": NODE}}}


def tag(content: dict[str, object]) -> StructuredOutput:
    """Free text, in which what begins with a marker is bound."""
    tags = [{"begin": "<f>", "content": content, "end": "</f>"}]
    return StructuredOutput.structural_tag(
        {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}
    )


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput.ebnf('root ::= "a" root'),
        StructuredOutput.ebnf('root ::= root "a"'),
        StructuredOutput.ebnf('root ::= "x" (a | b)\na ::= [0-9] b{2,5}\nb ::= "(" a ")"'),
        StructuredOutput.json_schema({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}),
        StructuredOutput.json_schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
        StructuredOutput.json_schema(
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {"type": "array", "prefixItems": [{"$ref": "#/$defs/b"}], "minItems": 1},
                    "b": {
                        "anyOf": [
                            {"$ref": "#/$defs/a"},
                            {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}},
                        ]
                    },
                },
            }
        ),
        tag(_CALL),
    ],
)
def test_what_never_ends_is_refused(backend: XGrammarBackend, wanted: StructuredOutput) -> None:
    with pytest.raises(GrammarError, match=f"no finite text fulfils the {wanted.kind}"):
        backend.compile(wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput.ebnf('root ::= "x" (a | b)\na ::= [0-9] b{0,5}\nb ::= "(" a ")"'),
        StructuredOutput.json_schema({"type": "array", "items": {"$ref": "#"}}),
        StructuredOutput.json_schema(
            {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]}
        ),
        StructuredOutput.json_schema({"properties": {"next": {"$ref": "#"}}}),
        tag({"type": "json_schema", "json_schema": {"properties": {"next": {"$ref": "#"}}}}),
        tag({"type": "any_text"}),
    ],
)
def test_what_can_end_is_compiled(backend: XGrammarBackend, wanted: StructuredOutput) -> None:
    assert backend.compile(wanted).num_bytes


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput.regex("a{100000000}"),
        StructuredOutput.ebnf("root ::= x{30000}\nx ::= [a-z]{30000}"),
    ],
)
def test_what_no_context_has_room_for_is_refused(
    backend: XGrammarBackend, wanted: StructuredOutput
) -> None:
    with pytest.raises(GrammarError, match="millions of characters"):
        backend.compile(wanted)


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
