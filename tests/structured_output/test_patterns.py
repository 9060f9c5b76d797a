"""Regular expressions as rules: what they match, as texts and in JSON, and what is refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from atom import StructuredOutput
from atom.structured_output.base import Grammar
from atom.structured_output.schema.patterns import PatternError, json_rule
from atom.structured_output.state import is_allowed
from atom.structured_output.xgrammar_backend import XGrammarBackend

VALUES = (
    *("", "a", "b", "ab", "abc", 'say "hi"', "a\nb", "C:\\temp", 'xyz"', "https://x", "n_1"),
    *(
        "日本",
        "é",
        "A1 b",
        "\x01",
        "😀",
        "aaa",
        "12-34",
        "a.b",
        "\t",
        "\x7f",
        "$",
        "x\ny",
        ",x",
        "-",
    ),
)


def takes(backend: XGrammarBackend, grammar: Grammar, text: str) -> bool:
    matcher = grammar.create_matcher()
    if not matcher.accept_text(text.encode()):
        return False
    mask = np.zeros((1, -(-len(backend.vocabulary.tokens) // 32)), dtype=np.int32)
    matcher.fill(mask, 0)
    return is_allowed(mask, 0, backend.vocabulary.stop_token_ids[0])


@pytest.mark.parametrize(
    "pattern",
    [
        *('say "hi"', "^a\nb$", r"^C:\\temp$", '^[^a]{3}"$', "^https?://", "^n_", "a|^b$", "^$"),
        *("^(a|b)+$", "(^|,)x", r"\A\d+-\d+\Z", r"[\w.-]{2,}b", r"\s", r"\S", "^.$", "^.{1,3}$"),
        *(r"^[^\s]+$", "^\\u65e5", r"\x01", r"[\x00-\x1f]", r"\$", "[$]", "^[-a]+$", "^[a-]+$"),
        *("[a-c]{2,}?", "^(?:a(?:b)?)*$", "x?", "^(|a)$", r"\-", "(a$|^b)", "", "[\U0001f600-]"),
        *(
            "(?P<name>a)b",
            r"[\s\S]",
            ".+",
            ".*",
            "a|b",
            "^a+|b+$",
            "^.*b",
            "a.*",
            "[a-c]{2}",
            "(ab)+",
        ),
        *("^a{2,}", "b{1,2}$", "(a|b)+", r"\\", '"'),
    ],
)
def test_patterns_match_what_python_matches(backend: XGrammarBackend, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    in_json = backend.compile(StructuredOutput.json_schema(schema))
    whole = backend.compile(StructuredOutput.regex(pattern or "()"))
    for value in VALUES:
        # A "$" of Python's stands before a last line feed too; no value ends in one.
        document = json.dumps(value, ensure_ascii=False)
        assert takes(backend, in_json, document) == bool(re.search(pattern, value, re.ASCII)), value
        assert takes(backend, whole, value) == bool(re.fullmatch(pattern, value, re.ASCII)), value


@pytest.mark.parametrize("low", [0, 2])
@pytest.mark.parametrize("high", [2, 5000, None])
def test_lengths_beside_patterns_count_characters(
    backend: XGrammarBackend, low: int, high: int | None
) -> None:
    schema: dict[str, object] = {"type": "string", "pattern": "^[^a]+$", "minLength": low}
    if high is not None:
        schema["maxLength"] = high
    grammar = backend.compile(StructuredOutput.json_schema(schema))
    for value in ("", "x", '"', '""', "\n\\", "日本", "xyz", "xya"):
        fits = "a" not in value and max(low, 1) <= len(value) <= (high or 99)
        assert takes(backend, grammar, json.dumps(value, ensure_ascii=False)) == fits, value


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        *(("(a", "not closed"), ("a)", "not opened"), ("*a", "nothing to repeat")),
        *(("[a", "ends within"), ("a\\", "ends within"), ("[b-a]", "wrong order")),
        *(("a{3,1}", "wrong order"), ("a{,3}", "escape it"), ("x{a}", "escape it")),
        *((r"(a)\1", "back reference"), (r"(?P<n>a)\k<n>", "back reference")),
        *(("(?=a)", "lookahead"), ("a(?!b)", "lookahead"), ("(?<!a)b", "lookbehind")),
        *(("(?i)a", "flags"), ("(?>a)", "atomic"), (r"\bid", "word boundary")),
        *((r"\p{L}", "Unicode classes"), (r"\Qa", "escape"), (r"\07", "octal")),
        *(("a++", "possessive"), ("a**", "possessive"), ("[]a]", "escape it")),
        *(("[[:alpha:]]", "escape it"), ("a^b", "anchor"), ("a$b", "anchor")),
        *(("(^a){2}b", "anchor"), (r"\ud800", "surrogate"), (r"\u12", "hexadecimal")),
    ],
)
def test_what_is_no_grammar_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(PatternError, match=reason):
        json_rule(pattern)
    with pytest.raises(ValueError, match=f"'pattern' .*{reason}"):
        StructuredOutput.json_schema({"type": "string", "pattern": pattern})
    with pytest.raises(ValueError, match=reason):
        StructuredOutput.regex(pattern)


def test_a_class_without_characters() -> None:
    with pytest.raises(ValueError, match="no characters"):
        StructuredOutput.regex("[^\\s\\S]")


def test_what_may_stand_around_has_one_reading() -> None:
    """With several a mask takes as long as the text so far has readings."""
    assert json_rule(".*") == json_rule("(ab)*") == json_rule("")
    assert json_rule("[a-z]+") == json_rule("[a-z]{1,9}") == json_rule("[a-z]")
    assert json_rule("^a{2,}") == json_rule("^a{2}")
    assert json_rule("a|b") == json_rule("[a-b]")
    before, _, after = json_rule("a").partition(" [a] ")
    assert f"({before.removesuffix('*')})*" == json_rule("^[^a]*$")
    assert after == json_rule("")
