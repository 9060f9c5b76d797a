"""Drafts that are looked up one step late, behind what a launched step is expected to bring."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_engine.overlap_bench import PROMPTS, Checkpoints, Watched, check_blocks
from spec_decode import engines
from spec_decode.engines import OracleLookup, params
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.graphs.capture import ReexecuteBackend
from atom.model_engine.scheduling import in_flight
from atom.model_engine.step import planned_graphs
from atom.spec_decode.suffix_index import Continuation


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("lookups"), byte_level_tokenizer)


class AnyLookup(OracleLookup):
    """Knows what follows, up to some token from which on it is wrong; or knows nothing."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]], k: int, seed: int) -> None:
        super().__init__(texts, k, wrong=False)
        self.rng = random.Random(seed)

    def find(
        self, row: int, prompt: Sequence[int], outputs: Sequence[int], more: int = 0
    ) -> Continuation:
        known = super().find(row, prompt, outputs, more)
        right = self.rng.randrange(-2, 9)
        if right < 0:
            return Continuation([], [])
        wrong = [(token + 1) % 300 for token in known.token_ids[right:]]
        sure = [self.rng.random() for _ in known.token_ids]
        return Continuation(known.token_ids[:right] + wrong, sure)

    def extend(self, row: int, drafts: Sequence[int], most: int) -> Continuation:
        return Continuation([], [])


class Unsure(AnyLookup):
    """Is right about some of the sequences, and less sure of each further token."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]], k: int, num_known: int) -> None:
        super().__init__(texts, k, 0)
        self._known = {tuple(prompt) for prompt in PROMPTS[:num_known]}

    def find(
        self, row: int, prompt: Sequence[int], outputs: Sequence[int], more: int = 0
    ) -> Continuation:
        known = OracleLookup.find(self, row, prompt, outputs, more)
        if tuple(prompt) not in self._known:
            return Continuation([], [])
        return Continuation(known.token_ids, [0.5] * len(known.token_ids))


def looks_up_with(llm: LLM, lookup: Any) -> None:
    executor: Any = llm.engine.core.executor
    executor.parts.drafter.lookup = lookup


def texts_of(checkpoints: Checkpoints, method: str) -> dict[tuple[int, ...], list[int]]:
    expected = engines.generate(checkpoints.plain(method), params("warm"), PROMPTS)
    return dict(zip(map(tuple, PROMPTS), expected, strict=True))


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_are_for_the_step_behind_the_launched_one(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """All that an oracle says is right, from the second step on; nobody waits for it."""
    texts = texts_of(checkpoints, "none")
    if graphs:
        monkeypatch.setattr(planned_graphs, "capture_backend", lambda _: ReexecuteBackend())
    llm = checkpoints.engine("suffix", overlap=True)
    looks_up_with(llm, OracleLookup(texts, 5, wrong=False))
    watched = Watched(llm, monkeypatch)
    assert engines.generate(llm, params("warm"), PROMPTS) == list(texts.values())
    stats = llm.engine.core.stats
    assert stats.spec_decode is not None
    assert stats.spec_decode.acceptance_rate == 1
    # The prompt's, one without drafts, and six tokens in each of the others.
    decoding = [b for b in watched.batches if b.sequences and not b.new]
    assert len(decoding) <= 8
    assert all(s.is_ahead for batch in decoding[:4] for s in batch.sequences)
    assert [len(b.sequences) for b in decoding[:3]] == [len(PROMPTS)] * 3
    numbers = [{s.num_drafts for s in b.sequences} for b in decoding]
    assert numbers[:3] == [{0}, {5}, {5}]
    if graphs:
        assert stats.num_replayed_decode_steps == stats.num_decode_steps
    check_blocks(llm)


@pytest.mark.parametrize(("num_known", "overlaps"), [(1, True), (2, False)])
def test_steps_overlap_unless_too_much_is_lost(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, num_known: int, overlaps: bool
) -> None:
    """A sequence loses a token in a step whose drafts are late: one in eight is too few to wait."""
    texts = texts_of(checkpoints, "none")
    llm = checkpoints.engine("suffix", overlap=True)
    looks_up_with(llm, Unsure(texts, 5, num_known))
    watched = Watched(llm, monkeypatch)
    assert engines.generate(llm, params("warm"), PROMPTS) == list(texts.values())
    # The first ones are launched before much is known.
    middle = [b for b in watched.batches if len(b.sequences) == len(PROMPTS)][3:]
    assert len(middle) > 1
    assert {s.is_ahead for b in middle for s in b.sequences} == {overlaps}
    check_blocks(llm)


@pytest.mark.parametrize("method", ["suffix", "lookup"])
def test_any_lookup_changes_no_token(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(in_flight, "_LOSES_ONE_OF", 1)
    texts = texts_of(checkpoints, "none" if method == "suffix" else "eagle3")
    llm = checkpoints.engine(method, overlap=True)

    @settings(max_examples=10)
    @given(seed=st.integers(0, 10**6), fewer=st.integers(0, 20), count=st.integers(1, len(PROMPTS)))
    def check(seed: int, fewer: int, count: int) -> None:
        looks_up_with(llm, AnyLookup(texts, 5, seed))
        wishes = [params("warm", max_tokens=max(24 - fewer * i, 1)) for i in range(count)]
        outputs = llm.generate(PROMPTS[:count], wishes, use_tqdm=False)
        for prompt, wish, output in zip(PROMPTS, wishes, outputs, strict=False):
            assert output.outputs[0].token_ids == texts[tuple(prompt)][: wish.max_tokens]
        check_blocks(llm)

    check()
    counts = llm.engine.core.stats.spec_decode
    assert counts is not None
    oracle = counts.by_source["oracle"]
    assert 0.1 < oracle.acceptance_rate < 0.9


def test_a_draft_model_goes_on_where_nothing_is_found(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts lie on the device; those of the lookup are the host's."""
    monkeypatch.setattr(in_flight, "_LOSES_ONE_OF", 0)
    texts = texts_of(checkpoints, "eagle3")
    llm = checkpoints.engine("lookup", overlap=True)
    looks_up_with(llm, AnyLookup(texts, 5, 3))
    watched = Watched(llm, monkeypatch)
    assert engines.generate(llm, params("warm"), PROMPTS) == list(texts.values())
    parts = [s for b in watched.batches for s in b.sequences if s.is_ahead and s.num_drafts]
    looked_up = [s for s in parts if s.knows_drafts]
    assert 5 < len(looked_up) < len(parts) - 5
    assert {s.draft_source for s in looked_up} == {"oracle"}
    assert {s.draft_source for s in parts if not s.knows_drafts} == {"eagle3"}
    assert all(any(s.draft_token_ids) for s in looked_up)


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ([], ([2, 3, 4], [0.25, 0.4, 0.3])),
        ([1, 2], ([4], [0.03])),
        ([1, 7], ([3, 4], [0.1, 0.3])),
        ([7, 2], ([2, 3, 4], [0.25, 0.4, 0.3])),
        ([1, 2, 3, 4], ([], [])),
    ],
)
def test_what_follows_a_launched_step(
    drafts: list[int], expected: tuple[list[int], list[float]]
) -> None:
    """Of 1, 2, 3, 4: as many as that step is expected to accept, and one, are left out."""
    every = Continuation([1, 2, 3, 4], [0.5, 0.5, 0.4, 0.3])
    later = every.behind(drafts)
    assert (later.token_ids, later.confidences) == (expected[0], pytest.approx(expected[1]))
