"""The async engine with a real engine process on a tiny checkpoint."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
import zmq
from endless import CACHE, ENDLESS_TOKENS
from patience import PATIENCE_SECONDS, is_gone, until

from atom.config import CacheOptions, ConfigError, EngineConfig, ModelOptions
from atom.messages import EngineDeadError, RequestRefusedError, StepReport
from atom.model_engine import async_engine
from atom.model_engine.admission import AdmissionLimits, QueueFullError
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.async_engine import (
    AsyncEngine,
    EngineShuttingDownError,
    EngineStuckError,
    NullObserver,
    RequestTimeoutError,
)
from atom.model_engine.processes import wire
from atom.model_engine.replicas import replica
from atom.outputs import RequestOutput
from atom.sampling_params import SamplingParams
from atom.text.observer import FinishedRequest
from atom.text.prepared_params import PreparedParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=ENDLESS_TOKENS, ignore_eos=True, seed=1)
MAX_NUM_SEQS = 4
MAX_WAITING = 8


class Recorder(NullObserver):
    def __init__(self) -> None:
        self.num_tokens = 0
        self.finished: list[tuple[str, int, int]] = []

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        self.num_tokens += num_tokens

    def on_request_finished(self, request: FinishedRequest) -> None:
        assert request.metrics.finished_time is not None
        counts = request.num_prompt_tokens, request.num_output_tokens
        self.finished.append((request.finish_reason, *counts))


@pytest.fixture(scope="module")
def config(endless_llama_dir: Path) -> EngineConfig:
    return engine_config(
        model=str(endless_llama_dir),
        dtype="float32",
        num_threads=1,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=64,
        kv_cache_memory=CACHE,
    )


@pytest.fixture(scope="module")
def observer() -> Recorder:
    return Recorder()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(config: EngineConfig, observer: Recorder) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(
        config, admission=AdmissionLimits(MAX_WAITING), observer=observer
    )
    yield engine
    await engine.shutdown(0)


@pytest_asyncio.fixture(loop_scope="module")
async def own_engine(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    """An engine that the test may break."""
    engine = await AsyncEngine.start(config)
    yield engine
    await engine.shutdown(0)


@pytest_asyncio.fixture(loop_scope="module")
async def one_by_one(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Of the engine's reports, however many there are at once, readers see each."""
    (replica,) = engine.replicas.living
    receive, kept, is_over = replica._client.receive, list[wire.FromEngine](), asyncio.Event()

    async def receive_one() -> list[wire.FromEngine]:
        for _ in range(3):  # readers run
            await asyncio.sleep(0)
        if not kept:
            kept.extend(await receive())
        # The last call may still wait when another test begins.
        count = len(kept) if is_over.is_set() else 1
        seen, kept[:] = kept[:count], kept[count:]
        return seen

    monkeypatch.setattr(replica._client, "receive", receive_one)
    await collect(engine, "first", GREEDY)  # this one is waited for in the old way
    yield
    is_over.set()
    while kept:
        await asyncio.sleep(0)


def encode(engine: AsyncEngine, text: str) -> list[int]:
    return list(engine.tokenizer(text, add_special_tokens=False)["input_ids"])


async def collect(
    engine: AsyncEngine, name: str, params: SamplingParams, stream: bool = True
) -> list[RequestOutput]:
    prompt = encode(engine, f"The quick {name}")
    return [o async for o in engine.generate(name, prompt, params, stream=stream)]


async def until_idle(engine: AsyncEngine) -> None:
    """The engine itself reports that nothing runs and no block is held."""
    await until(lambda: not engine.stats.num_running and not engine.stats.num_used_blocks)
    assert engine.stats.num_waiting == 0


@pytest.mark.usefixtures("one_by_one")
async def test_stream_equals_whole_result(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    deltas = await collect(engine, "fox", params)
    (whole,) = await collect(engine, "fox", params, stream=False)
    completion = whole.outputs[0]
    assert len(deltas) > 1
    assert "".join(d.outputs[0].text for d in deltas) == completion.text
    assert [t for d in deltas for t in d.outputs[0].token_ids] == completion.token_ids
    assert len(completion.token_ids) == 24
    assert len(completion.logprobs or []) == 24
    assert completion.text == engine.tokenizer.decode(
        completion.token_ids, skip_special_tokens=True
    )
    assert deltas[-1].outputs[0].cumulative_logprob == pytest.approx(
        completion.cumulative_logprob, abs=1e-4
    )
    assert completion.finish_reason == "length"
    assert whole.metrics.first_scheduled_time is not None
    assert whole.metrics.arrival_time <= whole.metrics.first_scheduled_time


async def test_many_at_once_equal_one_at_a_time(engine: AsyncEngine) -> None:
    params = SamplingParams(n=2, seed=5, max_tokens=16, ignore_eos=True)
    names = ["a", "bb", "ccc", "dddd"]
    alone = [await collect(engine, name, params, stream=False) for name in names]
    together = await asyncio.gather(*(collect(engine, n, params, stream=False) for n in names))
    for (one,), (other,) in zip(alone, together, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        assert one.outputs[0].token_ids != one.outputs[1].token_ids


async def test_prompts_that_begin_together_are_sent_together(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[wire.ToEngine] = []
    (replica,) = engine.replicas.living
    send = replica._client.send
    monkeypatch.setattr(replica._client, "send", lambda m: (sent.append(m), send(m))[1])
    params = PreparedParams(SamplingParams(n=2, seed=1, max_tokens=2, stop="?", logit_bias={3: 1}))

    async def last(name: str, given: SamplingParams | PreparedParams) -> RequestOutput:
        prompt = encode(engine, f"The quick {name}")
        return await anext(engine.generate(name, prompt, given, stream=False))

    together = await asyncio.gather(*(last(name, params) for name in "abc"))
    (added,) = [m for m in sent if isinstance(m, wire.AddRequests)]
    assert len(added.sequences) == 6
    assert len(added.prompts) == 3
    (crossed,) = added.params
    assert crossed == SamplingParams(n=2, seed=1, max_tokens=2, logit_bias={3: 1})
    for name, output in zip("abc", together, strict=True):
        alone = await last(name, params.params)
        assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in output.outputs]


async def test_a_request_that_is_left_at_once(engine: AsyncEngine) -> None:
    """Its abort must not overtake it."""
    task = asyncio.create_task(anext(engine.generate("l", encode(engine, "Hello"), ENDLESS)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await collect(engine, "after", GREEDY))[-1].finished
    await until_idle(engine)


async def test_stop_string_ends_the_sequence_in_the_engine(
    engine: AsyncEngine, observer: Recorder
) -> None:
    params = SamplingParams(seed=1, max_tokens=3900, ignore_eos=True, stop=["e"])
    deltas = await collect(engine, "stop", params)
    assert deltas[-1].outputs[0].finish_reason == "stop"
    assert deltas[-1].outputs[0].stop_reason == "e"
    assert "e" not in "".join(d.outputs[0].text for d in deltas)
    num_tokens = sum(len(d.outputs[0].token_ids) for d in deltas)
    assert observer.finished[-1] == ("stop", len(encode(engine, "The quick stop")), num_tokens)
    await until_idle(engine)


@pytest.mark.parametrize("way", ["break", "aclose", "cancel"])
async def test_leaving_early_frees_the_blocks(
    engine: AsyncEngine, observer: Recorder, way: str
) -> None:
    reading = asyncio.Event()

    async def read() -> None:
        outputs = engine.generate(way, encode(engine, "Hello"), ENDLESS)
        if way == "aclose":
            async with aclosing(outputs):
                await anext(outputs)
            return
        async for _ in outputs:
            reading.set()
            if way == "break":
                break

    task = asyncio.create_task(read())
    if way == "cancel":
        await reading.wait()
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until_idle(engine)
    assert observer.finished[-1][0] == "abort"
    # The name may be used again.
    assert (await collect(engine, way, GREEDY))[-1].finished


async def test_nothing_starts_before_the_first_read(engine: AsyncEngine) -> None:
    outputs = engine.generate("unread", encode(engine, "Hello"), ENDLESS)
    await asyncio.sleep(0.05)
    assert engine.stats.num_running == 0
    await outputs.aclose()


async def test_refused_requests(engine: AsyncEngine) -> None:
    limit = engine.limits.max_model_len
    for prompt, params, message in (
        ([], GREEDY, "no tokens"),
        ([5] * limit, GREEDY, str(limit)),
        ([5], SamplingParams(max_tokens=limit), "maximum context length"),
        ([engine.limits.vocab_size], GREEDY, "vocabulary"),
        ([5], SamplingParams(logprobs=1000), "max_logprobs"),
        ([5], SamplingParams(logprobs=-1), "max_logprobs"),
        ([5], SamplingParams(allowed_token_ids=[engine.limits.vocab_size]), "vocabulary"),
        ([5], SamplingParams(logits_processors=[lambda _, logits: logits]), "only LLM takes them"),
    ):
        with pytest.raises(RequestRefusedError, match=message):
            await anext(engine.generate("refused", prompt, params))
    with pytest.raises(RequestRefusedError, match="Unicode"):
        await anext(engine.generate("refused", [5], GREEDY, cache_salt="\ud800"))
    await until_idle(engine)


async def test_stop_string_that_is_no_valid_unicode(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, stop="\ud800")
    assert (await collect(engine, "surrogate", params))[-1].finished


@pytest.mark.usefixtures("one_by_one")
async def test_slow_reader_gets_merged_deltas(engine: AsyncEngine) -> None:
    (whole,) = await collect(engine, "slow", GREEDY, stream=False)
    outputs = engine.generate("slow", encode(engine, "The quick slow"), GREEDY)
    first = await anext(outputs)
    await until_idle(engine)
    second = await anext(outputs)
    assert second.finished
    texts = [o.outputs[0].text for o in (first, second)]
    tokens = first.outputs[0].token_ids + second.outputs[0].token_ids
    assert "".join(texts) == whole.outputs[0].text
    assert tokens == whole.outputs[0].token_ids
    with pytest.raises(StopAsyncIteration):
        await anext(outputs)


async def test_a_request_past_its_deadline(engine: AsyncEngine) -> None:
    running = [
        engine.generate(f"in front {i}", encode(engine, "The"), ENDLESS)
        for i in range(MAX_NUM_SEQS)
    ]
    for outputs in running:
        await anext(outputs)
    computed = engine.stats.num_prompt_tokens
    late = time.monotonic() + 0.2
    with pytest.raises(RequestTimeoutError, match="timeout"):
        await anext(engine.generate("waits", encode(engine, "A"), ENDLESS, deadline=late))
    with pytest.raises(RequestTimeoutError):
        await anext(engine.generate("never sent", encode(engine, "A"), ENDLESS, deadline=late))
    for outputs in running:
        await outputs.aclose()
    await until_idle(engine)
    assert engine.stats.num_prompt_tokens == computed, "what waited too long was computed"
    late = time.monotonic() + 0.5
    with pytest.raises(RequestTimeoutError):
        async for _ in engine.generate("runs", encode(engine, "A"), ENDLESS, deadline=late):
            pass
    await until_idle(engine)
    in_time = engine.generate(
        "ends", encode(engine, "A"), SamplingParams(max_tokens=2), deadline=late + 1000
    )
    assert [o async for o in in_time][-1].finished


async def test_full_queue(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)

    async def attempt(i: int) -> bool:
        try:
            await collect(engine, f"queue {i}", params)
        except QueueFullError:
            return False
        return True

    taken = await asyncio.gather(*(attempt(i) for i in range(MAX_NUM_SEQS + MAX_WAITING + 5)))
    assert taken.count(True) == MAX_NUM_SEQS + MAX_WAITING
    await until_idle(engine)
    assert await attempt(0)


async def test_a_stopped_engine(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """New requests are refused at once, waiting ones end, and it takes up work again."""
    await until(lambda: engine.trouble is None)
    prompt = encode(engine, "Hello")
    reader = engine.generate("stopped", prompt, ENDLESS)
    await anext(reader)

    async def read() -> None:
        async for _ in reader:
            pass

    os.kill(engine.pids[0], signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(replica, "SILENT_SECONDS", 2.0)
            patch.setattr(replica, "GIVE_UP_SECONDS", 2.0)
            await until(lambda: engine.trouble is not None)
            with pytest.raises(EngineStuckError, match="silent"):
                await anext(engine.generate("new", prompt, GREEDY))
            with pytest.raises(EngineStuckError, match="silent"):
                await asyncio.wait_for(read(), PATIENCE_SECONDS)
    finally:
        os.kill(engine.pids[0], signal.SIGCONT)
    await until(lambda: engine.trouble is None)
    assert (await collect(engine, "again", GREEDY))[-1].finished
    await until_idle(engine)


async def test_a_long_step_is_told_from_a_stuck_one(
    engine: AsyncEngine,
) -> None:
    (replica,) = engine.replicas.living
    replica._handle(wire.Heartbeat(wire.StepProgress(4000, 100.0, 100.5)))
    assert engine.trouble is None
    replica._handle(wire.Heartbeat(wire.StepProgress(4000, 101.0, 100.5)))
    assert engine.trouble == ("the engine's step of 4000 tokens has taken 101 s, more than 100 s")
    with pytest.raises(EngineStuckError, match="4000 tokens"):
        await anext(engine.generate("new", encode(engine, "Hello"), GREEDY))
    replica._handle(wire.Step(StepReport(outputs=[], stats=engine.stats)))
    assert engine.trouble is None


async def test_killed_engine(own_engine: AsyncEngine) -> None:
    engine = own_engine
    prompt = encode(engine, "Hello")
    readers = [engine.generate(f"{i}", prompt, ENDLESS, stream=i < 5) for i in range(6)]
    for reader in readers[:4]:
        await anext(reader)
    waiting = [asyncio.ensure_future(anext(reader)) for reader in readers[4:]]
    dead = asyncio.create_task(engine.wait_dead())
    await asyncio.sleep(0)
    assert engine.trouble is None
    os.kill(engine.pids[0], signal.SIGKILL)
    assert "killed by signal 9" in await asyncio.wait_for(dead, PATIENCE_SECONDS)
    for reader in readers[:4]:
        with pytest.raises(EngineDeadError, match="signal 9"):
            async for _ in reader:
                pass
    for future in waiting:
        with pytest.raises(EngineDeadError, match="signal 9"):
            await future
    assert engine.trouble is not None
    with pytest.raises(EngineDeadError, match="signal 9"):
        await anext(engine.generate("late", prompt, GREEDY))
    await engine.shutdown(5)


async def test_failing_engine_says_why(own_engine: AsyncEngine, config: EngineConfig) -> None:
    reader = own_engine.generate("r", encode(own_engine, "Hello"), ENDLESS)
    await anext(reader)
    # Out of place, as a bug would be: the loop cannot go on.
    (replica,) = own_engine.replicas.living
    replica._client.send(wire.Start(config, logging.INFO))
    with pytest.raises(EngineDeadError, match="TypeError: the engine is started already"):
        async for _ in reader:
            pass
    assert "started already" in await own_engine.wait_dead()
    assert own_engine.trouble is not None


async def test_shutdown_drains_then_aborts(
    own_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grace is over when the short request has ended, whenever that is."""
    engine = own_engine
    passed = 0.0
    monkeypatch.setattr(async_engine, "time", SimpleNamespace(monotonic=lambda: passed))
    prompt = encode(engine, "Hello")
    short = asyncio.create_task(collect(engine, "short", GREEDY))
    endless = engine.generate("endless", prompt, ENDLESS)
    await anext(endless)
    (pid,) = engine.pids
    down = asyncio.create_task(engine.shutdown(0.5))
    await asyncio.sleep(0)
    with pytest.raises(EngineShuttingDownError):
        await anext(engine.generate("late", prompt, GREEDY))
    assert (await short)[-1].outputs[0].finish_reason == "length"
    passed = 0.5
    rest = [output async for output in endless]
    assert rest[-1].finished
    assert rest[-1].outputs[0].finish_reason == "abort"
    await asyncio.gather(down, engine.shutdown(0))
    assert engine.trouble is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_sockets_that_never_close_stop_nobody(
    own_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ's end of a context may hang."""
    closing, may_end = threading.Event(), threading.Event()
    end = zmq.Context.term

    def hang(self: zmq.Context[zmq.Socket[bytes]]) -> None:
        closing.set()
        may_end.wait(2 * PATIENCE_SECONDS)
        end(self)

    monkeypatch.setattr(zmq.Context, "term", hang)
    (pid,) = own_engine.pids
    try:
        await asyncio.wait_for(own_engine.shutdown(0), PATIENCE_SECONDS)
        assert is_gone(pid)
        assert closing.wait(PATIENCE_SECONDS)
    finally:
        may_end.set()


async def test_startup_error_is_the_users_message(config: EngineConfig) -> None:
    # Found out in the engine process alone.
    with pytest.raises(ConfigError, match="10 bytes holds no block"):
        await AsyncEngine.start(dataclasses.replace(config, cache=CacheOptions(kv_cache_memory=10)))
    with pytest.raises(ConfigError, match="nowhere"):
        await AsyncEngine.start(dataclasses.replace(config, model=ModelOptions("./nowhere")))
