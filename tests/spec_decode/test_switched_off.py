"""Requests without drafts, alone and beside others: the same tokens, and nobody drafts for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from spec_decode import engines
from spec_decode.engines import PROMPTS, create_engine, params
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.outputs import RequestOutput
from atom.spec_decode import factory
from atom.spec_decode.draft_policy import Candidates, DraftNumbers, FixedDrafts
from atom.spec_decode.proposers.chain_proposer import ChainProposer

K = 3


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("off")
    target = engines.write_target("llama", folder / "target", byte_level_tokenizer)
    return target, engines.write_draft("mha", folder / "draft", len(byte_level_tokenizer))


@pytest.mark.parametrize(
    "options",
    [{}, {"speculative_lookup": True}],
    ids=["eagle3", "lookup"],
)
def test_tokens_are_the_same_and_no_drafts_are_made(
    folders: tuple[Path, Path], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = folders
    made: list[int] = []
    propose = ChainProposer.propose

    def watch(self: ChainProposer, step: Any, num_drafts: int) -> Any:
        made.append(num_drafts)
        return propose(self, step, num_drafts)

    monkeypatch.setattr(ChainProposer, "propose", watch)
    drafting = {"method": "eagle3", "draft_model": str(draft), "num_speculative_tokens": K}
    engine = create_engine(target, **drafting, **options)
    for setting in ("greedy", "warm"):
        on, off = params(setting), params(setting, speculation=False)
        expected = _run(engine, on)
        made.clear()
        alone = _run(engine, off)
        assert [_tokens(each) for each in alone] == [_tokens(each) for each in expected]
        assert all(each.spec_decode is None for each in alone)
        # The draft model still writes its KV: others may find the blocks in the cache.
        assert set(made) == {0}
        mixed = _run(engine, [off if i % 2 else on for i in range(len(PROMPTS))])
        assert [_tokens(each) for each in mixed] == [_tokens(each) for each in expected]
        assert all(each.spec_decode is None for each in mixed[1::2])
        assert all(step.num_drafts == 0 for each in mixed[1::2] for step in each.outputs[0].steps)
        assert any(each.spec_decode is not None for each in mixed[::2])
        for each in mixed:
            steps = each.outputs[0].steps
            assert sum(step.num_tokens for step in steps) == len(_tokens(each))


def test_fewer_drafts_are_verified_when_a_request_says_so(folders: tuple[Path, Path]) -> None:
    target, draft = folders
    drafting = {"method": "eagle3", "draft_model": str(draft), "num_speculative_tokens": K}
    engine = create_engine(target, **drafting)
    expected = [_tokens(each) for each in _run(engine, params("warm"))]
    for most in (1, 2, 1000):
        found = _run(engine, params("warm", num_speculative_tokens=most))
        assert [_tokens(each) for each in found] == expected
        drafts = [step.num_drafts for each in found for step in each.outputs[0].steps]
        assert max(drafts) == min(most, K)
    with pytest.raises(ValueError, match="num_speculative_tokens must be in"):
        params("warm", num_speculative_tokens=0)


@pytest.mark.parametrize("lookup", [False, True])
def test_numbers_of_drafts_are_chosen_among_those_that_are_wanted(
    folders: tuple[Path, Path], lookup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else others would be verified in their place, and then dropped."""
    chosen: list[int] = []
    made_drafts: list[list[int]] = []

    class Watched(FixedDrafts):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(K, K)

        def choose(self, num_looked_up: int, num_sequences: int) -> DraftNumbers:
            chosen.append(num_sequences)
            return super().choose(num_looked_up, num_sequences)

        def fit(self, numbers: DraftNumbers, made: Sequence[Candidates]) -> list[int]:
            made_drafts.append([each.count for each in made])
            return super().fit(numbers, made)

    monkeypatch.setattr(factory, "AdaptiveDrafts", Watched)
    target, draft = folders
    drafting = {"method": "eagle3", "draft_model": str(draft), "num_speculative_tokens": K}
    engine = create_engine(target, **drafting, speculative_adaptive=True, speculative_lookup=lookup)
    few, off = params("warm", num_speculative_tokens=2), params("warm", speculation=False)
    mixed = [off if i % 4 else few for i in range(len(PROMPTS))]
    _run(engine, mixed)
    assert max(chosen) == sum(each.speculation for each in mixed) == 4
    assert [len(numbers) for numbers in made_drafts] == chosen
    assert max(max(numbers) for numbers in made_drafts) == 2


def _run(engine: LLM, sampling: Any) -> list[RequestOutput]:
    return engine.generate(list(PROMPTS), sampling, use_tqdm=False)


def _tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids
