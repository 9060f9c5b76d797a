"""An engine of several ranks generates what one of a single rank does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from ranks import ThreadDriver, engines_of_threads
from spec_decode.engines import PROMPTS, SETTINGS, create_engine, generate, params, write_target
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.batch import LaunchedStep, ScheduledBatch
from atom.distributed.parallel_state import ParallelGroup
from atom.entrypoints.llm import GenerationError
from atom.kv_cache.paged import PagedCache
from atom.messages import EngineDeadError
from atom.model_engine.executor import RanksExecutor
from atom.sampling import sampler
from atom.sampling.logprobs import Logprobs, compute_logprobs


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    return write_target("llama", tmp_path_factory.mktemp("llama"), byte_level_tokenizer)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    with create_engine(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[LLM]:
    with engines_of_threads(), create_engine(folder, tensor_parallel_size=2) as engine:
        yield engine


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_tokens(alone: LLM, pair: LLM, setting: str) -> None:
    assert generate(pair, params(setting)) == generate(alone, params(setting))


def test_greedy_and_sampled_rows_of_one_step(alone: LLM, pair: LLM) -> None:
    """And steps that change from the one to the other."""
    settings = ([*SETTINGS] * len(PROMPTS))[: len(PROMPTS)]
    sampling = [params(setting, max_tokens=4 + 2 * i) for i, setting in enumerate(settings)]
    expected, got = (
        [output.outputs[0].token_ids for output in engine.generate(PROMPTS, sampling)]
        for engine in (alone, pair)
    )
    assert got == expected


def test_greedy_rows_exchange_no_logits(
    alone: LLM, pair: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One logit of each rank, and nothing else after the model."""
    expected = generate(alone, params("greedy"))
    gathered, stack = set(), ParallelGroup.stack

    def recorded(group: ParallelGroup, tensor: torch.Tensor) -> torch.Tensor:
        gathered.add((tensor.dtype, tensor.shape[-1]))
        return stack(group, tensor)

    monkeypatch.setattr(ParallelGroup, "stack", recorded)
    monkeypatch.setattr(ParallelGroup, "broadcast", None)
    assert generate(pair, params("greedy")) == expected
    assert gathered == {(torch.int32, 2)}


@pytest.mark.parametrize("setting", ["greedy", "warm"])
def test_logits_that_are_not_numbers(alone: LLM, pair: LLM, setting: str) -> None:
    """Of the request amid others whose prompt has the token; the rank that embeds it spoils it."""
    poison, prompts = 7, [[5, 9, 11], [5, 7, 11], [4, 3]]
    executor = pair.engine.core.executor
    assert isinstance(executor, RanksExecutor)
    weight = executor._worker.parts.model.token_embedding.weight
    kept = weight[poison].clone()
    expected = alone.generate([prompts[0], prompts[2]], params(setting))
    try:
        with torch.inference_mode():
            weight[poison] = torch.nan
        with pytest.raises(GenerationError, match="1 of 3 prompts failed; prompt 1") as caught:
            pair.generate(prompts, params(setting))
    finally:
        with torch.inference_mode():
            weight[poison] = kept
    assert "no token can be chosen after 0 tokens" in str(caught.value.errors[1])
    results = [result for result in caught.value.results if result is not None]
    assert [r.outputs[0].token_ids for r in results] == [r.outputs[0].token_ids for r in expected]


@pytest.mark.parametrize("setting", ["greedy", "warm"])
def test_logprobs_come_from_the_first_rank(
    alone: LLM, pair: LLM, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt that is computed in several parts; other ranks compute none."""
    threads = []

    def recorded(*args: Any) -> Logprobs:
        threads.append(threading.get_ident())
        return compute_logprobs(*args)

    monkeypatch.setattr(sampler, "compute_logprobs", recorded)
    sampling = params(setting, logprobs=2, prompt_logprobs=1, max_tokens=4)
    prompt = checkpoints.prompt(80, seed=30)
    [own], [other] = (engine.generate([prompt], sampling) for engine in (alone, pair))
    assert set(threads) == {threading.get_ident()}
    for mine, theirs in zip(
        [*own.prompt_logprobs[1:], *own.outputs[0].logprobs],
        [*other.prompt_logprobs[1:], *other.outputs[0].logprobs],
        strict=True,
    ):
        assert mine.keys() == theirs.keys()
        assert [mine[token].logprob for token in mine] == pytest.approx(
            [theirs[token].logprob for token in mine], abs=1e-5
        )


def test_a_request_that_fails_while_sampling_ends_alone(pair: LLM) -> None:
    def broken(_: list[int], __: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing")

    with pytest.raises(Exception, match="no such thing"):
        pair.generate([PROMPTS[0]], params("greedy", logits_processors=[broken]))
    assert generate(pair, params("greedy"))


def test_a_rank_that_is_lost_in_a_step_spoils_its_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are those of collectives that were ended, not of the model."""
    with engines_of_threads(), create_engine(folder, tensor_parallel_size=2) as engine:
        executor = engine.engine.core.executor
        assert isinstance(executor, RanksExecutor)
        launch = executor._worker.launch

        def lose(batch: ScheduledBatch) -> LaunchedStep:
            launched = launch(batch)
            monkeypatch.setattr(ThreadDriver, "lost", "rank 1 was killed")
            return launched

        monkeypatch.setattr(executor._worker, "launch", lose)
        with pytest.raises(EngineDeadError, match="rank 1 was killed"):
            generate(engine, params("greedy"))


def test_a_failure_of_rank_0_is_told_to_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    causes: list[str | None] = []
    close = ThreadDriver.close

    def note(driver: ThreadDriver, cause: str | None = None) -> None:
        causes.append(cause)
        close(driver, cause)

    monkeypatch.setattr(ThreadDriver, "close", note)
    with engines_of_threads(), create_engine(folder, tensor_parallel_size=2) as engine:
        executor = engine.engine.core.executor
        assert isinstance(executor, RanksExecutor)
        launch = executor._worker.launch

        def fail(batch: ScheduledBatch) -> LaunchedStep:
            assert executor._driver.is_awaited
            launch(batch)
            raise ValueError("no such thing")

        monkeypatch.setattr(executor._worker, "launch", fail)
        for _ in range(2):  # and nothing is published to nobody
            with pytest.raises(EngineDeadError, match="rank 0 raised ValueError: no such thing"):
                generate(engine, params("greedy"))
        assert not executor._driver.is_awaited
    assert causes[0] == "rank 0 raised ValueError: no such thing"


def test_a_rank_that_fails_while_loading_ends_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first exchange after it, before anything on the devices waits for the rank."""
    exchanged: list[int] = []

    def exchange(group: ParallelGroup, _: list[int]) -> list[list[int]]:
        exchanged.append(group.rank)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(ParallelGroup, "exchange", exchange)
    monkeypatch.setattr(PagedCache, "allocate_kv_cache_tensors", None)
    with engines_of_threads(), pytest.raises(Exception, match=r"closed by peer"):
        create_engine(folder, tensor_parallel_size=2)
    assert exchanged
