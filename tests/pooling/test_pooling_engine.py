"""Batches of many requests' inputs, and what becomes of those that fail, are given up or wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pooling_checkpoints as checkpoints
import pytest
from patience import PATIENCE_SECONDS
from transformers import BertConfig, BertModel

from atom import LLM
from atom.messages import EngineDeadError, RequestFailedError
from atom.model_engine.admission import AdmissionLimits, QueueFullError
from atom.model_engine.async_engine import EngineShuttingDownError
from atom.pooling.async_engine import AsyncPoolingEngine
from atom.pooling.engine import BatchQueue, PoolingEngine
from atom.pooling.inputs import LockedTokenizer, PoolingInput


def inputs_of(*lengths: int) -> list[PoolingInput]:
    return [PoolingInput([4] * length) for length in lengths]


def lengths_taken(queue: BatchQueue) -> list[int]:
    batch = queue.take()
    assert batch is not None
    return [len(request.inputs[number].token_ids) for request, number in batch]


def test_batches_hold_their_padding() -> None:
    """Six tokens each: 3 and 3, then 2, 2 and 1; a longer input is alone."""
    queue = BatchQueue(max_tokens=6, max_inputs=8)
    queue.add(inputs_of(2, 3, 1, 9, 3, 2))
    assert queue.num_waiting == 6
    assert [lengths_taken(queue) for _ in range(3)] == [[9], [3, 3], [2, 2, 1]]
    queue.add(inputs_of(*[1] * 9))
    assert [len(lengths_taken(queue)) for _ in range(2)] == [6, 3]


def test_each_request_has_its_turn() -> None:
    """One text waits for one batch, not for thousands that came before it."""
    queue = BatchQueue(max_tokens=100, max_inputs=4)
    queue.add(inputs_of(*[5] * 20))
    queue.add(inputs_of(2))
    queue.add(inputs_of(3, 3))
    assert lengths_taken(queue) == [5, 2, 3, 5]
    assert lengths_taken(queue) == [3, 5, 5, 5]


def test_each_client_has_its_turn() -> None:
    """However many requests one sends, another's come in between."""
    queue = BatchQueue(max_tokens=100, max_inputs=4)
    for _ in range(6):
        queue.add(inputs_of(5, 5), "a")
    given_up = queue.add(inputs_of(9), "c")
    queue.add(inputs_of(3, 2), "b")
    queue.add(inputs_of(4), "b")
    given_up.cancel()
    assert queue.num_waiting == 16
    assert lengths_taken(queue) == [5, 3, 5, 4]
    assert lengths_taken(queue) == [5, 2, 5, 5]
    assert queue.num_waiting == 7


def test_what_nobody_waits_for_is_not_computed() -> None:
    queue = BatchQueue(max_tokens=4, max_inputs=2)
    given_up = queue.add(inputs_of(2, 2, 2))
    queue.add(inputs_of(1))
    given_up.cancel()
    assert lengths_taken(queue) == [1]
    left = queue.add(inputs_of(1))
    queue.close()
    assert left.cancelled()
    assert queue.take() is None


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    config = BertConfig(
        **checkpoints.SIZES, vocab_size=19, max_position_embeddings=102, pad_token_id=0
    )
    tokenizer = checkpoints.word_tokenizer(with_types=True)
    checkpoints.write_model(folder, BertModel, config, tokenizer)
    checkpoints.write_modules(folder, checkpoints.MEAN)
    return folder


@pytest.fixture
def engine(bert: Path) -> Iterator[PoolingEngine]:
    engine = checkpoints.create_engine(bert)
    yield engine
    engine.shutdown()


Compute = Callable[[Sequence[PoolingInput]], list[np.ndarray]]


def test_one_wrong_input_fails_its_own_request(
    engine: PoolingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beside it in a batch are computed again."""
    compute = engine.loaded.model.compute
    gate = threading.Event()

    def fails_on_five(batch: Sequence[PoolingInput]) -> list[np.ndarray]:
        gate.wait(PATIENCE_SECONDS)
        if any(len(each.token_ids) == 5 for each in batch):
            raise RuntimeError("five")
        rows = compute(batch)
        return [
            row * np.nan if len(each.token_ids) == 6 else row
            for row, each in zip(rows, batch, strict=True)
        ]

    monkeypatch.setattr(engine.loaded.model, "compute", fails_on_five)
    futures = [engine.submit(inputs_of(*lengths)) for lengths in ((9,), (3, 4), (5, 2), (6,))]
    gate.set()
    results = [outcome(future) for future in futures]
    assert isinstance(results[1], list)
    assert len(results[1]) == 2
    assert [str(each) for each in results[2:]] == [
        "computing an input raised RuntimeError: five",
        "the result of input 0 is not finite",
    ]
    assert engine.stats.num_waiting == 0


def outcome(future: Future[list[np.ndarray]]) -> list[np.ndarray] | RequestFailedError:
    try:
        return future.result(PATIENCE_SECONDS)
    except RequestFailedError as error:
        return error


async def test_requests_of_an_event_loop(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on while a batch is computed; beyond the limit, and at the end, requests are
    refused.
    """
    engine = AsyncPoolingEngine(checkpoints.create_engine(bert), AdmissionLimits(1))
    compute = engine.engine.loaded.model.compute
    gate = threading.Event()

    def waits(batch: Sequence[PoolingInput]) -> list[np.ndarray]:
        assert gate.wait(PATIENCE_SECONDS)
        return compute(batch)

    monkeypatch.setattr(engine.engine.loaded.model, "compute", waits)
    running, waiting = (asyncio.create_task(engine.compute(inputs_of(3))) for _ in range(2))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="max_waiting_requests=1"):
        await engine.compute(inputs_of(3))
    waiting.cancel()
    gate.set()
    assert len(await running) == 1
    await engine.shutdown(PATIENCE_SECONDS)
    with pytest.raises(EngineShuttingDownError):
        await engine.compute(inputs_of(3))
    assert await engine.wait_dead() == "the engine was shut down"


def test_a_death_is_told_to_those_who_wait(
    engine: PoolingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(batch: Sequence[PoolingInput]) -> list[np.ndarray]:
        raise SystemExit(len(batch) + 2)

    monkeypatch.setattr(engine.loaded.model, "compute", dies)
    future = engine.submit(inputs_of(3))
    assert "the engine died: SystemExit: 3" in str(outcome(future))
    engine.ended.result(PATIENCE_SECONDS)
    assert engine.death == "SystemExit: 3"
    with pytest.raises(EngineDeadError):
        engine.submit(inputs_of(3))


def test_one_thread_at_a_time_has_the_tokenizer() -> None:
    """What one has it cut to would hold for the other."""
    inside: list[int] = []

    def tokenizer(text: str) -> list[str]:
        inside.append(1)
        threading.Event().wait(0.001)
        assert len(inside) == 1
        inside.pop()
        return [text]

    locked = LockedTokenizer(tokenizer)
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(locked, "abcdefgh")] == [[letter] for letter in "abcdefgh"]


def test_llm(bert: Path) -> None:
    """Text, tokens and dicts; scores are cosines."""
    with LLM(str(bert), device="cpu", is_matryoshka=True) as llm:
        fox, same = llm.embed(["the fox", {"prompt_token_ids": [1, 4, 7, 2]}])
        assert fox.prompt_token_ids == [1, 4, 7, 2]
        assert np.allclose(fox.outputs.embedding, same.outputs.embedding, atol=1e-6)
        assert fox.outputs.hidden_size == 48
        (short,) = llm.embed("the fox", dimensions=5)
        assert short.outputs.hidden_size == 5
        (plain,) = llm.embed("the fox", use_activation=False)
        length = np.linalg.norm(plain.outputs.embedding)
        assert abs(length - 1) > 0.1
        assert np.allclose(plain.outputs.embedding / length, fox.outputs.embedding, atol=1e-6)
        (dog,) = llm.embed("a lazy dog")
        one, other = llm.score("the fox", ["the fox", "a lazy dog"])
        assert one.outputs.score == pytest.approx(1)
        cosine = np.dot(fox.outputs.embedding, dog.outputs.embedding)
        assert other.outputs.score == pytest.approx(cosine, abs=1e-5)
        assert other.prompt_token_ids == [*fox.prompt_token_ids, *dog.prompt_token_ids]
        assert llm.get_tokenizer().cls_token == "[CLS]"
        assert llm.embed([]) == []
        with pytest.raises(ValueError, match="data_2\\[0\\] is not valid Unicode"):
            llm.score("a", ["\ud800", "b"])
        assert llm.embed("the fox " * 99, truncate_prompt_tokens=7)[0].prompt_token_ids[-1] == 2
