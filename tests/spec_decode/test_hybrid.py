"""A lookup beside the draft, and lengths that change: the same tokens, and a draft that is
always up to date."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import prompt
from spec_decode import engines
from spec_decode.engines import PROMPTS, create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom.spec_decode.draft_policy import Candidates, DraftNumbers, FixedDrafts
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.proposers.base import Proposer
from atom.spec_decode.suffix_lookup import SuffixLookup

K = 3
LOOKUP = "lookup"
# Loops are what a lookup finds; the others keep the draft at work.
MIXED = [*PROMPTS[:4], *PROMPTS[10:14], prompt(6, seed=5) * 3]


class RandomDrafts(FixedDrafts):
    """Any number of drafts at any step, none included, and any of them verified."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._rng = random.Random(0)

    def choose(self, num_looked_up: int, num_sequences: int) -> DraftNumbers:
        asked = self._rng.choice([0, 0, *range(self._most + 1)])
        own = min(asked, K) if num_looked_up < num_sequences else 0
        return DraftNumbers(own, asked, asked)

    def fit(self, numbers: DraftNumbers, made: Sequence[Candidates]) -> list[int]:
        return [self._rng.randint(0, each.count) for each in made]


class Bench:
    """A target with a drafter, and what it says without."""

    def __init__(self, kind: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        target, _, draft = kind.partition(" ")
        self.target = engines.write_target(target, folder / "target", tokenizer)
        self.options: dict[str, Any] = {"num_speculative_tokens": K, "method": draft}
        if draft != "mtp":
            written = engines.write_draft(draft, folder / "draft", len(tokenizer))
            self.options |= {"method": "eagle3", "draft_model": str(written)}
        self.source: str = self.options["method"]
        plain = create_engine(self.target)
        self.settings = ("greedy", "warm")
        self.expected = {name: generate(plain, params(name), MIXED) for name in self.settings}
        with pytest.MonkeyPatch.context() as patch, engines.drafts_recorded(patch) as recorded:
            pure = create_engine(self.target, **self.options)
        for name, expected in self.expected.items():
            assert generate(pure, params(name), MIXED) == expected
        # What the draft proposes when it runs at every step.
        (self.always,) = recorded


@pytest.fixture(scope="module", params=["llama mha", "deepseek_v3 mla", "deepseek_v3 mtp"])
def bench(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> Bench:
    return Bench(request.param, tmp_path_factory.mktemp("hybrid"), byte_level_tokenizer)


def test_tokens_are_those_without_speculation(bench: Bench) -> None:
    """With everything on."""
    options = {"speculative_lookup": True, "speculative_adaptive": True}
    engine = create_engine(bench.target, **bench.options, **options)
    for name, expected in bench.expected.items():
        assert generate(engine, params(name), MIXED) == expected


def test_statistics_tell_the_sources_apart(bench: Bench) -> None:
    engine = create_engine(bench.target, **bench.options, speculative_lookup=True)
    outputs = engine.generate(MIXED, params("greedy"), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == bench.expected["greedy"]
    stats = engine.engine.core.stats.spec_decode
    assert stats is not None
    assert set(stats.by_source) == {bench.source, LOOKUP}
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(s, name) for s in stats.by_source.values()) == getattr(stats, name)
    per_request = [output.spec_decode for output in outputs]
    for source, found in stats.by_source.items():
        own = [s.by_source[source] for s in per_request if s is not None and source in s.by_source]
        assert sum(s.num_drafts for s in own) == found.num_drafts > 0
        assert sum(s.num_accepted_tokens for s in own) == found.num_accepted_tokens
    assert f"{LOOKUP} " in stats.describe()


@pytest.mark.parametrize("way", ["lookup", "both", "waiting"])
def test_a_draft_is_what_it_would_be_if_it_had_always_run(
    bench: Bench, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the draft proposes, its KV is that of a draft that proposed at every step.

    `waiting` is the order of a GPU: the draft first, then the lookup in what was sampled.
    """

    def create(_: object, proposer: Proposer, **__: bool) -> Drafter:
        length = None if way == "lookup" else RandomDrafts(K)
        lookup = SuffixLookup(LOOKUP, K)
        return Drafter(proposer, bench.source, lookup, length, sync_is_free=way != "waiting")

    with engines.drafts_recorded(monkeypatch, create) as recorded:
        # Alone, so that nobody else needs the draft when the lookup finds something.
        batch, chosen = (
            ({"max_num_seqs": 1}, slice(1, None, 2)) if way == "lookup" else ({}, slice(None))
        )
        other = create_engine(bench.target, **bench.options, **batch)
    for name, expected in bench.expected.items():
        assert generate(other, params(name), MIXED[chosen]) == expected[chosen]
    (sometimes,) = recorded
    skipped = [history for history, row in sometimes.items() if not row]
    compared = [h for h, row in sometimes.items() if row and h in bench.always]
    assert len(skipped) > 20
    assert len(compared) > 20
    longest = {tuple(p): len(p) + len(t) for p, t in zip(MIXED, expected, strict=True)}
    for history in compared:
        start = max((p for p in longest if history[: len(p)] == p), key=len)
        # Drafts that max_tokens keeps from ever being verified may be made without a KV slot.
        room = max(longest[start] - len(history) - 1, 0)
        row = sometimes[history][:room]
        assert row == bench.always[history][: len(row)]
