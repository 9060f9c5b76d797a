"""An engine of several ranks generates what one of a single rank does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import ThreadDriver, engines_of_threads
from spec_decode.engines import PROMPTS, SETTINGS, create_engine, generate, params, write_target
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.batch import ScheduledBatch, StepOutput
from atom.distributed.parallel_state import ParallelGroup
from atom.kv_cache.paged import PagedCache
from atom.messages import EngineDeadError
from atom.model_engine.executor import RanksExecutor


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


def test_logprobs_come_from_the_first_rank(alone: LLM, pair: LLM) -> None:
    sampling = params("greedy", logprobs=2, prompt_logprobs=1, max_tokens=4)
    [own], [other] = (engine.generate([PROMPTS[3]], sampling) for engine in (alone, pair))
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
        step = executor._worker.step

        def lose(batch: ScheduledBatch) -> StepOutput:
            output = step(batch)
            monkeypatch.setattr(ThreadDriver, "lost", "rank 1 was killed")
            return output

        monkeypatch.setattr(executor._worker, "step", lose)
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
        step = executor._worker.step

        def fail(batch: ScheduledBatch) -> StepOutput:
            assert executor._driver.is_awaited
            step(batch)
            raise ValueError("no such thing")

        monkeypatch.setattr(executor._worker, "step", fail)
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
