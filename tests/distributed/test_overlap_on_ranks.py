"""Several ranks whose steps overlap: the first one publishes a step before it has read the last
one's results, and the others launch it behind theirs, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from model_engine.overlap_bench import (
    METHODS,
    PROMPTS,
    Checkpoints,
    KnowingProposer,
    Watched,
    check_blocks,
    check_wishes,
)
from ranks import ThreadDriver, engines_of_threads
from spec_decode import engines
from spec_decode.engines import params
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.batch import RankStep, ScheduledBatch
from atom.entrypoints.llm import GenerationError
from atom.messages import EngineDeadError
from atom.model_engine import worker
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.start_up.warm_up import warm_up
from atom.spec_decode.proposers.base import Proposal, VerifiedStep


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("overlap"), byte_level_tokenizer)


def create_pair(checkpoints: Checkpoints, method: str) -> LLM:
    """Two ranks, as threads."""
    with engines_of_threads():
        return checkpoints.engine(
            method, overlap=True, tensor_parallel_size=2, max_num_batched_tokens=48
        )


@pytest.fixture(scope="module")
def pairs(checkpoints: Checkpoints) -> Iterator[Callable[[str], LLM]]:
    with ExitStack() as stack:
        yield cache(lambda method: stack.enter_context(create_pair(checkpoints, method)))


@pytest.fixture
def pair(checkpoints: Checkpoints) -> Iterator[LLM]:
    """One that may be spoilt."""
    with create_pair(checkpoints, "none") as llm:
        yield llm


@pytest.mark.parametrize(
    ("method", "setting"),
    [("none", "warm"), ("eagle3", "greedy"), ("adaptive", "top-p"), ("lookup", "greedy")],
)
def test_tokens_are_as_alone(
    checkpoints: Checkpoints, pairs: Callable[[str], LLM], method: str, setting: str
) -> None:
    alone = checkpoints.plain(METHODS[method].get("method", "none"))
    expected = engines.generate(alone, params(setting), PROMPTS)
    assert engines.generate(pairs(method), params(setting), PROMPTS) == expected


def test_requests_with_wishes_beside_others(
    checkpoints: Checkpoints, pairs: Callable[[str], LLM]
) -> None:
    check_wishes(checkpoints.plain("eagle3"), pairs("eagle3"))


def test_all_ranks_launch_ahead(
    pairs: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, follow, numbers = pairs("eagle3"), ModelRunner.follow, iter(range(1000))
    watched = Watched(llm, monkeypatch)

    def watched_follow(runner: ModelRunner, rank_step: RankStep) -> None:
        watched.events.append(f"follow {next(numbers)}")
        follow(runner, rank_step)

    monkeypatch.setattr(ModelRunner, "follow", watched_follow)
    engines.generate(llm, params("warm"), PROMPTS[:2])
    events = watched.events
    for number in range(1, len(watched.batches) - 1):
        for of_next in ("launch", "follow"):
            assert events.index(f"{of_next} {number + 1}") < events.index(f"collect {number}")
    assert all(s.is_ahead for batch in watched.batches[1:] for s in batch.sequences)


class WrongProposer(KnowingProposer):
    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        return Proposal((super().propose(step, num_drafts).token_ids + 1) % 300)


def test_the_first_ranks_drafts_count_on_all(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank drafts by itself, and the next step begins before the host has compared them."""
    expected = engines.generate(checkpoints.plain("none"), params("greedy"), PROMPTS)
    texts = [[*prompt, *outputs] for prompt, outputs in zip(PROMPTS, expected, strict=True)]

    def create(*args: Any) -> KnowingProposer:
        return (WrongProposer if args[-1].group.rank else KnowingProposer)(texts)

    monkeypatch.setattr(worker, "create_proposer", create)
    with create_pair(checkpoints, "none") as llm:
        assert engines.generate(llm, params("greedy"), PROMPTS) == expected
        counts = llm.engine.core.stats.spec_decode
        assert 0.5 < counts.num_accepted_tokens / counts.num_draft_tokens < 0.9


def is_fifth_of_the_second(batch: ScheduledBatch) -> bool:
    """Whether the step computes the second prompt's fifth output."""
    place = len(PROMPTS[1]) + 4
    return any(s.id.startswith("1/") and s.start <= place < s.context_len for s in batch.sequences)


def test_what_fails_before_it_is_published_ends_alone(
    checkpoints: Checkpoints, pair: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the step before it runs on all ranks."""
    expected = engines.generate(checkpoints.plain("none"), params("warm"), PROMPTS)
    watched = Watched(pair, monkeypatch)
    watched.raises = lambda batch, event: (
        ValueError("bad") if event.startswith("launch") and is_fifth_of_the_second(batch) else None
    )
    with pytest.raises(GenerationError, match="1 of 8 prompts failed; prompt 1") as caught:
        pair.generate(PROMPTS, params("warm"), use_tqdm=False)
    results = [r and r.outputs[0].token_ids for r in caught.value.results]
    assert results == [expected[0], None, *expected[2:]]
    check_blocks(pair)


def test_a_request_that_fails_while_sampling_ends_alone(
    checkpoints: Checkpoints, pairs: Callable[[str], LLM]
) -> None:
    def broken(outputs: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(outputs) == 3:
            raise ValueError("no such thing")
        return logits

    expected = engines.generate(checkpoints.plain("eagle3"), params("warm"), PROMPTS)
    wishes = [params("warm") for _ in PROMPTS]
    wishes[1] = params("warm", logits_processors=[broken])
    llm = pairs("eagle3")
    with pytest.raises(GenerationError, match="1 of 8 prompts failed; prompt 1") as caught:
        llm.generate(PROMPTS, wishes, use_tqdm=False)
    results = [r and r.outputs[0].token_ids for r in caught.value.results]
    assert results == [expected[0], None, *expected[2:]]
    check_blocks(llm)


def test_what_fails_after_it_is_published_ends_the_engine(
    pair: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(pair, monkeypatch)
    watched.raises = lambda _, event: ValueError("bad") if event == "collect 3" else None
    with pytest.raises(EngineDeadError, match="rank 0 raised ValueError: bad"):
        pair.generate(PROMPTS, params("warm"), use_tqdm=False)
    assert watched.events[-1] == "collect 3"
    assert "launch 4" in watched.events


@pytest.mark.parametrize("event", ["launch 4", "collect 3"])
def test_a_rank_that_is_lost_with_two_steps_in_flight(
    pair: LLM, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """What is in flight is not read."""
    watched = Watched(pair, monkeypatch)

    def lose(_: ScheduledBatch, at: str) -> None:
        if at == event:
            monkeypatch.setattr(ThreadDriver, "lost", "rank 1 was killed")

    watched.raises = lose
    with pytest.raises(EngineDeadError, match="rank 1 was killed"):
        pair.generate(PROMPTS, params("warm"), use_tqdm=False)
    assert watched.events[-1] == event


def test_ctrl_c_waits_for_the_step(
    checkpoints: Checkpoints, pairs: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = pairs("eagle3")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            watched = Watched(llm, patch)

            def press(_: ScheduledBatch, event: str) -> None:
                if event == "launch 4":
                    for _ in range(2):
                        os.kill(os.getpid(), signal.SIGINT)

            watched.raises = press
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, params("warm"), use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, before)
    # All that was launched has been read.
    launched = [e for e in watched.events if e.startswith("launch")]
    assert len(watched.events) == 2 * len(launched)
    check_blocks(llm)
    expected = engines.generate(checkpoints.plain("eagle3"), params("greedy"), PROMPTS)
    assert engines.generate(llm, params("greedy"), PROMPTS) == expected


def test_ranks_warm_up_together(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, before they serve: all at the same place, and as ever after it."""
    allocate, warmed = worker.allocate_kv_cache, []

    def then_warm_up(rank: Any, parts: Any, runner: ModelRunner) -> Any:
        allocated = allocate(rank, parts, runner)
        warm_up(rank, parts, runner, allocated[0])
        warmed.append(rank.groups.is_first)
        return allocated

    monkeypatch.setattr(worker, "allocate_kv_cache", then_warm_up)
    expected = engines.generate(checkpoints.plain("eagle3"), params("warm"), PROMPTS)
    warmed.clear()
    with create_pair(checkpoints, "eagle3") as llm:
        assert engines.generate(llm, params("warm"), PROMPTS) == expected
        assert sorted(warmed) == [False, True]
