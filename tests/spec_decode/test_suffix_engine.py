"""The suffix lookup in an engine: whose outputs it finds, and what it adds to a draft's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from models import checkpoints
from spec_decode import engines
from spec_decode.engines import create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.batch import Lookahead, ScheduledBatch, ScheduledSequence
from atom.messages import EngineRequest
from atom.spec_decode.draft_policy import AdaptiveDrafts, DraftNumbers
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.proposers.base import NullProposer, Proposer
from atom.spec_decode.suffix_index import Continuation
from atom.spec_decode.suffix_lookup import SuffixLookup

PROMPT = checkpoints.prompt(9)
K = 2


@pytest.fixture(scope="module")
def target(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    folder = tmp_path_factory.mktemp("suffix")
    return engines.write_target("llama", folder, byte_level_tokenizer)


def answer(engine: LLM, salt: str) -> tuple[list[int], int]:
    """The tokens of an answer that is sampled, and how many steps they took."""
    core, tokens, steps = engine.engine.core, [], 0
    core.add_request(
        EngineRequest(
            id="one",
            prompt_token_ids=PROMPT,
            params=params("top-p", max_tokens=40),
            seed=2,
            cache_salt=salt,
        )
    )
    while core.has_work:
        steps += 1
        tokens += [token for output in core.step().outputs for token in output.token_ids]
    return tokens, steps


def test_recent_outputs_are_those_of_the_same_salt(target: Path) -> None:
    engine = create_engine(
        target, method="suffix", num_speculative_tokens=15, suffix_cache_tokens=100
    )
    first, slow = answer(engine, "a")
    again, fast = answer(engine, "a")
    other, slow_again = answer(engine, "b")
    assert first == again == other
    assert slow == slow_again == 40
    assert fast < 10
    # Two outputs of 40 tokens do not fit beside each other.
    for _ in range(3):
        answer(engine, "b")
        assert engine.engine.core.stats.num_lookup_tokens <= 100 + len(PROMPT) + 40
    assert answer(engine, "a")[1] == 40


def test_outputs_are_not_kept_unless_asked(target: Path) -> None:
    engine = create_engine(target, method="suffix", num_speculative_tokens=15)
    assert [answer(engine, "")[1] for _ in range(2)] == [40, 40]


class Extending(SuffixLookup):
    """Never rivals the draft, and goes on after its drafts."""

    def find(
        self, row: int, prompt: Sequence[int], outputs: Sequence[int], more: int = 0
    ) -> Continuation:
        return Continuation([], [])

    def extend(self, row: int, drafts: Sequence[int], most: int) -> Continuation:
        following = [(drafts[-1] + 1 + i) % 100 for i in range(5)][:most]
        return Continuation(following, [1.0] * len(following))


def test_drafts_are_extended(
    target: Path,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More drafts than the proposer makes are verified, and its KV stays right."""
    expected = generate(create_engine(target), params("warm"))
    draft = engines.write_draft("mha", tmp_path, len(byte_level_tokenizer))
    options = {"method": "eagle3", "draft_model": str(draft), "num_speculative_tokens": K}

    def create(_: object, proposer: Proposer, **__: bool) -> Drafter:
        return Drafter(proposer, "eagle3", Extending("lookup", 6), None, sync_is_free=True)

    with engines.drafts_recorded(monkeypatch) as always:
        pure = create_engine(target, **options)
    assert generate(pure, params("warm")) == expected
    with engines.drafts_recorded(monkeypatch, create) as recorded:
        engine = create_engine(target, **options)
    assert generate(engine, params("warm")) == expected
    stats = engine.engine.core.stats.spec_decode
    assert stats is not None
    assert stats.num_draft_tokens > 5 * stats.num_drafts
    assert list(stats.by_source) == ["eagle3"]
    shared = always[0].keys() & recorded[0].keys()
    assert len(shared) > 20
    assert all(always[0][history] == recorded[0][history] for history in shared)


def test_the_lookup_goes_on_where_the_draft_ends() -> None:
    """Up to the most drafts of a sequence; where it drafted itself, nothing is added."""
    proposer = NullProposer(Lookahead(K))
    drafter = Drafter(proposer, "draft", Extending("lookup", 4), None, sync_is_free=False)
    numbers = drafter.begin(2)
    assert numbers.made == K
    drafter.look_up([3, 5], [([], [])] * 2)
    own = Continuation([70, 71, 72], [0.9] * 3)
    merged = drafter.merge(numbers, [3, 5], [None, own], [np.array([[10, 20], [30, 40]])])
    assert merged == [([10, 20, 21, 22], "draft"), ([70, 71, 72], "lookup")]


class Fixed(SuffixLookup):
    def find(
        self, row: int, prompt: Sequence[int], outputs: Sequence[int], more: int = 0
    ) -> Continuation:
        return Continuation([1, 2], [0.9, 0.5])


@pytest.mark.parametrize("reads", [True, False])
def test_the_lookup_drafts_where_it_beats_what_the_draft_brought(reads: bool) -> None:
    """0.9 + 0.45 expected tokens against one, at first; without a draft, against nothing."""
    proposer = NullProposer()
    proposer.reads_steps = reads
    drafter = Drafter(proposer, "draft", Fixed("lookup", 15), None, sync_is_free=True)
    assert drafter.look_up([0], [([], [])])[0] is not None
    drafter._accepted = 1.5
    assert (drafter.look_up([0], [([], [])])[0] is None) == reads


def test_the_lookup_rests_where_no_drafts_pay() -> None:
    """One step, then three; it works again when drafts pay."""
    proposer = NullProposer(Lookahead(K))
    proposer.reads_steps = True
    policy = AdaptiveDrafts((0, K), "draft", "lookup", made=K, recording=lambda: 0.0)
    drafter = Drafter(proposer, "draft", Fixed("lookup", 15), policy, sync_is_free=True)
    drafter._accepted = 1.0
    sequence = ScheduledSequence("one", 0, [5], 0, [], 1, wants_sample=True, wants_drafts=True)
    looked = []
    for count in (0, 0, 2, 0, 0, 0, 0, 0, 0, 0):
        drafter.start(ScheduledBatch([sequence], [], []))
        (found,) = drafter.look_up([0], [([], [])])
        looked.append(found is not None)
        if found is not None:
            drafter.merge(DraftNumbers(most=count), [0], [found], [])
    assert looked == [True, False, True, True, False, True, False, False, False, True]
