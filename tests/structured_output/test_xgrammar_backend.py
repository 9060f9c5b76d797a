"""Grammars over a vocabulary: what is text, what is a marker, when a text may end."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from atom import StructuredOutput
from atom.structured_output.base import GrammarError, Matcher, TokenMask
from atom.structured_output.state import GrammarState, is_allowed
from atom.structured_output.tags import json_document, literal, sequence, token
from atom.structured_output.vocabulary import read_vocabulary
from atom.structured_output.xgrammar_backend import XGrammarBackend

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Bench:
    """A backend over a tokenizer whose vocabulary is padded by 10 ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.eos_token_id
        self.vocab_size = len(tokenizer) + 10
        self.backend = XGrammarBackend(read_vocabulary(tokenizer, self.vocab_size, [self.eos]))

    def matcher(self, wanted: StructuredOutput) -> Matcher:
        return self.backend.compile(wanted).create_matcher()

    def mask(self, matcher: Matcher) -> TokenMask:
        mask = np.full((1, -(-self.vocab_size // 32)), -1, dtype=np.int32)
        matcher.fill(mask, 0)
        return mask

    def allows(self, matcher: Matcher, token_id: int) -> bool:
        return is_allowed(self.mask(matcher), 0, token_id)

    def feed(self, matcher: Matcher, text: str) -> bool:
        """Whether the grammar takes the text's tokens, each of which the mask must foretell."""
        for token_id in self.tokenizer.encode(text, add_special_tokens=False):
            allowed = self.allows(matcher, token_id)
            assert matcher.accept(token_id) == allowed
            if not allowed:
                return False
        return True

    def takes(self, wanted: StructuredOutput, text: str) -> bool:
        """Whether the text is complete under the grammar."""
        matcher = self.matcher(wanted)
        return self.feed(matcher, text) and self.allows(matcher, self.eos)


@pytest.fixture(scope="module")
def bench(byte_level_tokenizer: PreTrainedTokenizerFast) -> Bench:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
    )
    tokenizer.add_tokens([AddedToken("<call>", special=False), AddedToken("</think>")])
    return Bench(tokenizer)


KINDS: list[tuple[StructuredOutput, list[str], list[str]]] = [
    (StructuredOutput.json_object(), ['{"a": [1, {"b": null}]}', "{}"], ["[1]", "{", ""]),
    (
        StructuredOutput.json_schema(SCHEMA),
        ['{"name": "Käse 😀", "age": 3}', '{\n  "name": "",\n  "age": -1\n}'],
        ['{"name": "x"}', '{"name": 1, "age": 2}', '{"name": "x", "age": 1, "more": 1}'],
    ),
    (
        StructuredOutput.json_schema({"type": "object", "properties": {"a": {"type": "object"}}}),
        ['{"a": {"b": [1]}}', '{"a": {}}', "{}"],
        ['{"b": 1}'],
    ),
    (StructuredOutput.json_schema({"type": "object"}), ['{"b": [1]}', "{}"], ["[]"]),
    (StructuredOutput.json_schema({}), ['{"b": [1]}', "5"], ["x"]),
    (StructuredOutput.regex("[a-c]{2}(日本)?"), ["ab", "cc日本"], ["a", "abc", "日本"]),
    (StructuredOutput.choice(["yes", "no", 'a "b"']), ["yes", "no", 'a "b"'], ["ye", "maybe"]),
    (
        StructuredOutput.ebnf('root ::= "x" tail\ntail ::= "." | "," root'),
        ["x.", "x,x,x."],
        ["x", "x,"],
    ),
]


@pytest.mark.parametrize(("wanted", "good", "bad"), KINDS, ids=lambda v: getattr(v, "kind", ""))
def test_texts_of_each_kind(
    bench: Bench, wanted: StructuredOutput, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not bench.takes(wanted, text)] == []
    assert [text for text in bad if bench.takes(wanted, text)] == []


def test_markers_and_padding_are_no_text(bench: Bench) -> None:
    matcher = bench.matcher(StructuredOutput.json_schema(SCHEMA))
    assert bench.feed(matcher, '{"name": "<')
    for marker in ("<call>", "</think>", "<|im_start|>", "<|endoftext|>", "<|im_end|>"):
        assert not bench.allows(matcher, bench.tokenizer.convert_tokens_to_ids(marker))
    assert not bench.allows(matcher, bench.vocab_size - 1)
    matcher = bench.matcher(StructuredOutput.regex(".*"))
    assert not bench.allows(matcher, bench.tokenizer.convert_tokens_to_ids("<call>"))


@pytest.mark.parametrize("marker", ["<call>", "<no-token>"])
def test_markers_of_tags_are_tokens_where_there_are_such(bench: Bench, marker: str) -> None:
    document = json_document(SCHEMA)
    call = {"type": "tag", "begin": token(marker), "content": document, "end": token("</end>")}
    wanted = StructuredOutput.structural_tag(sequence(token(marker), literal("!"), call))
    assert bench.takes(wanted, marker + "!" + marker + '{"name": "a", "age": 1}</end>')
    if marker == "<call>":
        spelled = bench.matcher(wanted)
        assert not bench.allows(spelled, bench.tokenizer.convert_tokens_to_ids("<"))


@pytest.mark.parametrize("marker", ["<call>", "<no-token>"])
def test_triggered_tags(bench: Bench, marker: str) -> None:
    tag = {"type": "tag", "begin": token(marker), "content": literal("f()"), "end": token(";")}
    format = {"type": "token_triggered_tags", "trigger_tokens": [marker], "tags": [tag]}
    wanted = StructuredOutput.structural_tag(format)
    assert bench.takes(wanted, "free text")
    assert bench.takes(wanted, f"free </think> text {marker}f();{marker}f(); more")
    assert not bench.takes(wanted, f"free text {marker}g();")
    assert not bench.takes(wanted, f"free text {marker}")


@pytest.mark.parametrize("marker", ["</think>", "<no-token>"])
def test_free_text_before_the_constraint(bench: Bench, marker: str) -> None:
    wanted = StructuredOutput(kind="regex", value="[0-9]+", starts_after=marker)
    assert bench.takes(wanted, f"12 is < 日本 {marker}34")
    assert not bench.takes(wanted, "12")
    assert not bench.takes(wanted, f"12{marker}")
    assert not bench.takes(wanted, f"12{marker}x")


@pytest.mark.parametrize(("opens", "closes"), [("<call>", "</think>"), ("<no>", "<no-token>")])
def test_free_text_that_the_answer_may_begin(bench: Bench, opens: str, closes: str) -> None:
    wanted = StructuredOutput(kind="regex", value="[0-9]+", starts_after=closes, opens_with=opens)
    assert bench.takes(wanted, "34")
    assert bench.takes(wanted, f"{opens}12 is < 日本 {closes}34")
    assert bench.takes(wanted, f"{opens}{closes}\n\n34")
    assert not bench.takes(wanted, f"12{closes}34")
    assert not bench.takes(wanted, f"{opens}12")
    assert not bench.takes(wanted, f"{opens}12{closes}x")


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (StructuredOutput.ebnf('root ::= "a" other'), '"other" is not defined'),
        (StructuredOutput.ebnf('start ::= "a"'), '"root" is not found'),
        (StructuredOutput.ebnf('root ::= root "a"'), "no finite text fulfils"),
        (StructuredOutput.ebnf('roét ::= "a"'), "Unexpected character"),
        (StructuredOutput.json_schema(False), "cannot accept any value"),
        (StructuredOutput.structural_tag({"type": "nothing"}), "nothing"),
        (StructuredOutput.structural_tag({"type": "tag"}), "tag"),
    ],
    ids=lambda value: value.value[:20] if isinstance(value, StructuredOutput) else "",
)
def test_wrong_grammars(bench: Bench, wanted: StructuredOutput, reason: str) -> None:
    with pytest.raises(GrammarError, match=r"cannot be compiled|no (finite )?text") as error:
        bench.backend.compile(wanted)
    assert reason in str(error.value)
    assert ".cc" not in str(error.value)


def rows_after(bench: Bench, wanted: StructuredOutput, drafts: list[int]) -> list[Any]:
    """The mask behind each prefix of `drafts`, each by a matcher of its own."""
    rows: list[Any] = []
    for count in range(len(drafts) + 1):
        matcher = bench.matcher(wanted)
        if not all(matcher.accept(draft) for draft in drafts[:count]) or matcher.is_finished:
            rows.append(np.full(-(-bench.vocab_size // 32), -1, dtype=np.int32))
        else:
            rows.append(bench.mask(matcher)[0])
    return rows


@pytest.mark.parametrize(
    "text", ['{"name": "a", "age": 1}', '{"nmae": "a"', "}", '{"name": "a", "age": 1}<|im_end|>xx']
)
def test_rows_behind_drafts(bench: Bench, text: str) -> None:
    """Every row equals that of a matcher which has read the drafts, and nothing is kept."""
    wanted = StructuredOutput.json_schema(SCHEMA)
    drafts = bench.tokenizer.encode(text, add_special_tokens=False)
    state = GrammarState(bench.matcher(wanted))
    mask = np.full((len(drafts) + 2, -(-bench.vocab_size // 32)), -1, dtype=np.int32)
    for _ in range(2):
        state.fill(mask, 1, drafts)
        assert (mask[0] == -1).all()
        for row, expected in zip(mask[1:], rows_after(bench, wanted, drafts), strict=True):
            np.testing.assert_array_equal(row, expected)
    valid = bench.tokenizer.encode('{"name": "a", "age": 1}', add_special_tokens=False)
    assert state.advance([*valid, bench.eos, 5, 6]) == len(valid) + 3
    assert state.advance([5]) == 1


def test_dead_ends_are_told(bench: Bench) -> None:
    """The token that must be drawn where nothing is allowed is refused by `advance`."""
    state = GrammarState(bench.matcher(StructuredOutput.ebnf('root ::= "a" b | "x"\nb ::= b "c"')))
    a = bench.tokenizer.convert_tokens_to_ids("a")
    mask = np.zeros((2, -(-bench.vocab_size // 32)), dtype=np.int32)
    state.fill(mask, 0, [a])
    assert is_allowed(mask, 0, a)
    assert (mask[1] == -1).all()
    assert state.advance([a, a]) == 1


def test_properties_come_in_the_order_of_the_schema(bench: Bench) -> None:
    wanted = StructuredOutput.json_schema(json.dumps(SCHEMA))
    assert bench.takes(wanted, '{"name": "a", "age": 1}')
    assert not bench.takes(wanted, '{"age": 1, "name": "a"}')


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0), (0, 1), (0, 5), (2, 5), (4, 4), (0, 128), (126, 130)]
)
def test_strings_of_limited_length(bench: Bench, low: int, high: int) -> None:
    """Alone, in arrays, optional, and within tags; short ones are chains of rules."""
    text = {"type": "string", "minLength": low, "maxLength": high}
    schema = {
        "type": "object",
        "properties": {
            "a": text,
            "b": {"type": "array", "items": text},
            "c": {"type": "string", "pattern": "^x{2}$"},
            "d": {"enum": ["quite long"]},
        },
        "required": ["a"],
        "additionalProperties": text,
    }
    wanted = StructuredOutput.structural_tag(sequence(literal("<"), json_document(schema)))
    for length in {0, 1, low - 1, low, (low + high) // 2, high, high + 1} - {-1}:
        value = json.dumps("日本, a<b"[:length].ljust(length, "x"), ensure_ascii=False)
        fits = low <= length <= high
        assert bench.takes(wanted, f'<{{"a": {value}}}') == fits
        if fits:
            rest = f'"b": [{value}, {value}], "c": "xx", "d": "quite long", "e":{value}'
            assert bench.takes(wanted, f'<{{"a": {value}, {rest}}}')


def test_strings_of_limited_length_hold_no_raw_control_characters(bench: Bench) -> None:
    matcher = bench.matcher(StructuredOutput.json_schema({"type": "string", "maxLength": 9}))
    assert bench.feed(matcher, '"a')
    for token_id in np.flatnonzero(
        np.unpackbits(bench.mask(matcher).view(np.uint8), bitorder="little")
    ):
        text = bench.tokenizer.decode([token_id])
        assert '"' in text or not any(c < " " for c in text), text
    assert not bench.allows(matcher, bench.tokenizer.encode("\t", add_special_tokens=False)[0])


NESTED: Any = {"a": [{"b": 1}, {"b": 22}], 'whitespace_1{0, 64} ":"': [[], {}], "c": "x"}
NESTED_SCHEMA = {"type": "object", "properties": {name: {} for name in NESTED}}


@pytest.mark.parametrize(
    "wanted", [StructuredOutput.json_object(), StructuredOutput.json_schema(NESTED_SCHEMA)]
)
def test_documents_have_a_usual_layout(bench: Bench, wanted: StructuredOutput) -> None:
    """One line or indented lines: a weak model would go on with blank ones."""
    document = NESTED
    for _ in range(3):
        document = {"a": document, **{name: NESTED[name] for name in list(NESTED)[1:]}}
    for text in (
        json.dumps(document),
        json.dumps(document, separators=(",", ":")),
        json.dumps(document, indent=1),
        json.dumps(document, indent=4),
        json.dumps(document, indent="\t"),
        '{ "a": [ 1, 2 ] }',
    ):
        assert bench.takes(wanted, text), text
    for text in (
        '{"a":\n1}',
        '{"a"\n: 1}',
        '{"a" : 1}',
        '{\n\n"a": 1}',
        '{"a": 1\n\n}',
        '{"a": 1\n, "c": 1}',
        '{  "a": 1}',
        "{\n" + " " * 41 + '"a": 1}',
        '{"a":  1}',
    ):
        assert not bench.takes(wanted, text), text


def test_grammars_that_differ_in_their_markers_alone(bench: Bench) -> None:
    """One after another, from one backend, each has masks of its own."""
    names = ("<call>", "</think>")

    def allowed(*markers: str) -> list[bool]:
        optional = [{"type": "optional", "content": token(marker)} for marker in markers]
        wanted = StructuredOutput.structural_tag(sequence(*optional, literal("x")))
        matcher = bench.matcher(wanted)
        ids = bench.tokenizer.convert_tokens_to_ids(list(names))
        return [bench.allows(matcher, token_id) for token_id in ids]

    for _ in range(2):
        assert allowed(names[0]) == [True, False]
        assert allowed(names[1]) == [False, True]
        assert allowed(*names) == allowed(*reversed(names)) == [True, True]


@pytest.mark.parametrize("more", [{}, {"pattern": "^x"}], ids=["plain", "beside a pattern"])
def test_letters_before_hexadecimal_digits_stay_letters(bench: Bench, more: dict[str, str]) -> None:
    """Names and values: `ße` is no character of its own."""
    other = {"type": "string", **more}
    properties = {"größe": {"enum": ["ßa", "\\xdf0", "é9"]}, "z": other}
    schema = {"type": "object", "properties": properties, "required": ["größe"]}
    wanted = StructuredOutput.json_schema(schema)
    for value in ("ßa", "\\xdf0", "é9"):
        assert bench.takes(wanted, json.dumps({"größe": value}, ensure_ascii=False))
    for wrong in ('{"gr\u00f6\u0dfe": "ßa"}', '{"größe": "\u0dfa"}', '{"größe": "\u0e99"}'):
        assert not bench.takes(wanted, wrong)
