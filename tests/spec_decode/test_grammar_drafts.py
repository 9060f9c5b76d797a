"""Drafts of grammars: what must follow, and what is left of others' drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from atom import SamplingParams, StructuredOutput
from atom.batch import Lookahead
from atom.options.speculative import SpeculativeOptions
from atom.sampling.rows import SequenceState
from atom.sampling_params import Needs
from atom.spec_decode.factory import create_drafter
from atom.spec_decode.grammar import GrammarDrafter
from atom.spec_decode.proposers.base import NullProposer
from atom.structured_output import state as states
from atom.structured_output.spelling import Spelling
from atom.structured_output.state import GrammarState
from atom.structured_output.tags import literal, sequence, token
from atom.structured_output.vocabulary import read_vocabulary
from atom.structured_output.xgrammar_backend import XGrammarBackend

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["xone", "xther"]},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "kind", "ok"],
    "additionalProperties": False,
}
DOCUMENT = StructuredOutput.json_schema(SCHEMA)


class Bench:
    """A backend that can spell, and drafts as texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert tokenizer.eos_token_id is not None
        self.encode = partial(tokenizer.encode, add_special_tokens=False)
        self.tokenizer = tokenizer
        self.eos: int = tokenizer.eos_token_id
        vocabulary = read_vocabulary(tokenizer, len(tokenizer), [self.eos])
        self.backend = XGrammarBackend(vocabulary, Spelling(vocabulary.tokens, self.encode))

    def state(self, wanted: StructuredOutput, text: str) -> tuple[GrammarState, list[int]]:
        grammar = self.backend.compile(wanted)
        state = GrammarState(grammar.create_matcher(), grammar.spelling)
        outputs = self.encode(text)
        assert state.advance(outputs) == len(outputs)
        return state, outputs

    def draft(
        self,
        wanted: StructuredOutput,
        text: str,
        others: Sequence[int] = (),
        most: int = 40,
    ) -> tuple[str, bool]:
        """What follows a text, and whether it had to."""
        state, outputs = self.state(wanted, text)
        mask = np.zeros((2, -(-len(self.tokenizer) // 32)), dtype=np.int32)
        state.fill(mask, 0, [])
        with GrammarDrafter(most).drafts([5], [state], [outputs]) as drafts:
            assert drafts is not None
            draft = drafts.finish([others])[0]
        state.fill(mask, 1, [])
        np.testing.assert_array_equal(mask[0], mask[1])
        assert state.advance(draft.token_ids) == len(draft.token_ids)
        return self.tokenizer.decode(draft.token_ids), draft.is_forced


@pytest.fixture(scope="module")
def bench(byte_level_tokenizer: PreTrainedTokenizerFast) -> Bench:
    return Bench(byte_level_tokenizer)


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ("", "{"),
        ('{"', 'name": "'),
        ('{"na', 'me": "'),
        ('{"name": "x', ""),
        ('{"name": "x"', ', "kind": "x'),
        ('{"name":"x"', ',"kind":"x'),
        ('{\n  "name": "x"', ',\n  "kind": "x'),
        ('{"name": "x","kind": "xo', 'ne","ok":'),
        ('{\n  "name": "x",\n  "kind": "xther",\n  "ok": t', "rue\n}<|im_end|>"),
    ],
)
def test_what_must_follow_a_document(bench: Bench, text: str, follows: str) -> None:
    assert bench.draft(DOCUMENT, text) == (follows, bool(follows))


def test_other_grammars(bench: Bench) -> None:
    assert bench.draft(StructuredOutput.choice(["日本語", "日本人"]), "日") == ("本", True)
    assert bench.draft(StructuredOutput.regex("[ab]{2}-[cd]"), "ab") == ("-", True)
    assert bench.draft(StructuredOutput.ebnf('root ::= "(" root ")" | "x"'), "((x") == (
        "))<|im_end|>",
        True,
    )


def test_markers_are_single_tokens(bench: Bench) -> None:
    frame = sequence(literal("ab"), token("<|im_start|>"), literal("c"))
    wanted = StructuredOutput.structural_tag(frame)
    assert bench.draft(wanted, "a") == ("b<|im_start|>c<|im_end|>", True)


def test_tokens_are_those_of_the_whole_text(bench: Bench) -> None:
    """Not those of the part alone, and none that might reach further."""
    texts = 'say {"name": "the theory"}'
    state, outputs = bench.state(StructuredOutput.regex('say [{]"name": "the the[a-z]+"}'), "sa")
    with GrammarDrafter(40).drafts([0], [state], [outputs]) as drafts:
        assert drafts is not None
        made = drafts.finish([[]])[0].token_ids
    whole = bench.encode(texts)
    assert outputs + made == whole[: len(outputs) + len(made)]
    assert len(made) > 5


def test_others_drafts_go_on_while_they_are_allowed(bench: Bench) -> None:
    draft = partial(bench.draft, DOCUMENT)
    assert draft('{"name": "x', bench.encode('yz", "kind": "')) == ('yz", "kind": "x', False)
    assert draft('{"name": "x', bench.encode('y": 3')) == ('y", "kind": "x', False)
    # What must follow goes first: it is certain.
    assert draft('{"', bench.encode("kind")) == ('name": "', True)
    assert draft('{"name": "x", "kind": "x', bench.encode("abc")) == ("", False)
    assert draft('{"name": "x', bench.encode("abcdefgh"), most=2) == ("ab", False)


def test_a_guided_proposer_sees_what_is_allowed(bench: Bench) -> None:
    state, outputs = bench.state(DOCUMENT, '{"name": "x", "kind": "x')
    o, t, x = (bench.encode(letter)[0] for letter in "otx")
    target_ids = torch.tensor([x, t, o])
    logits = torch.tensor([[1.0, 3.0, 2.0], [9.0, 5.0, 1.0]])
    rows = [3, 4]
    with GrammarDrafter(40).drafts(rows, [None, state], [[], outputs]) as drafts:
        assert drafts is not None
        guide = drafts.guide([None, None])
        seen = logits.clone()
        guide.restrict(seen, target_ids)
        assert seen.tolist() == [[1.0, 3.0, 2.0], [-torch.inf, 5.0, 1.0]]
        taken = target_ids[seen.argmax(1)]
        guide.take(taken)
        assert taken.tolist() == [t, t]
        # The draft knows none of the tokens: it goes on by what must follow.
        seen = logits[:, :1].clone()
        guide.restrict(seen, target_ids[:1])
        assert seen.tolist() == [[1.0], [9.0]]
        taken = torch.tensor([x, x])
        guide.take(taken)
        assert taken[0] == x
        assert taken[1] == bench.encode("her")[0]
        draft = drafts.finish([[], [x, x]])[1]
    assert bench.tokenizer.decode(draft.token_ids) == 'ther", "ok":'
    assert not draft.is_forced


@pytest.mark.parametrize(
    ("is_free", "captured", "most"), [(True, (), 15), (True, (1, 3), 2), (False, (), 2)]
)
def test_no_more_than_steps_were_made_for(
    bench: Bench, is_free: bool, captured: tuple[int, ...], most: int
) -> None:
    """In graphs, and on a GPU, where memory is measured with as many drafts as others are."""
    drafter = create_drafter(
        SpeculativeOptions("suffix", 2),
        NullProposer(Lookahead(2)),
        captured=captured,
        sync_is_free=is_free,
        is_ahead=not is_free,
        recorder=None,
    )
    grammar, outputs = bench.state(StructuredOutput.regex("x09182736455463728190"), "x")
    state = SequenceState(SamplingParams(), 0, [], outputs, Needs.GRAMMAR, grammar=grammar)
    with drafter.grammar_drafts([0], [state]) as drafts:
        assert drafts is not None
        assert len(drafts.finish([[]])[0].token_ids) == most


def test_drafting_that_costs_too_much_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence goes on without."""
    state, outputs = bench.state(DOCUMENT, '{"')
    monkeypatch.setattr(states, "_DRAFT_STEP_SECONDS", -1.0)
    drafter = GrammarDrafter(4)
    for expected in (1, 0):
        with drafter.drafts([0], [state], [outputs]) as drafts:
            assert drafts is not None
            assert len(drafts.finish([[]])) == expected
    assert not state.is_too_slow
