"""Several replicas behind one frontend, with engines that do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from patience import PATIENCE_SECONDS, until
from transformers import PreTrainedTokenizerFast

from atom.messages import (
    EngineDeadError,
    EngineLimits,
    EngineStats,
    FinishReason,
    SequenceOutput,
    StepReport,
)
from atom.model_engine.admission import AdmissionLimits, QueueFullError
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.async_engine import (
    MAX_TRIES,
    AsyncEngine,
    EngineShuttingDownError,
    EngineStuckError,
)
from atom.model_engine.processes import wire
from atom.model_engine.replicas import replica, replica_set
from atom.outputs import RequestOutput
from atom.sampling_params import SamplingParams

LIMITS = EngineLimits(
    max_model_len=400, num_blocks=50, block_size=16, vocab_size=300, max_logprobs=5
)
PARAMS = SamplingParams(max_tokens=100)


class StubEngine:
    """In place of an `EngineClient`: `live` are the sequences that it has, by id."""

    def __init__(self) -> None:
        self.pid = id(self)
        self.is_alive = self.is_open = True
        self.live: dict[str, int] = {}
        self.aborted: list[str] = []
        self._messages: asyncio.Queue[wire.FromEngine | EngineDeadError] = asyncio.Queue()

    def send(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.AddRequests):
            self.live |= {request.id: request.seed for request in message.requests()}
        elif isinstance(message, wire.Abort):
            self.aborted += message.ids
            for sequence_id in message.ids:
                self.live.pop(sequence_id, None)

    async def receive(self) -> list[wire.FromEngine]:
        message = await self._messages.get()
        if isinstance(message, EngineDeadError):
            raise message
        return [message]

    def says(self, sequence_id: str, *token_ids: int, ends: bool = False) -> None:
        reason = FinishReason.LENGTH if ends else None
        output = SequenceOutput(id=sequence_id, token_ids=list(token_ids), finish_reason=reason)
        if ends:
            del self.live[sequence_id]
        stats = EngineStats(num_running=len(self.live), num_generation_tokens=10)
        self._messages.put_nowait(wire.Step(StepReport(outputs=[output], stats=stats)))

    def beats(self) -> None:
        self._messages.put_nowait(wire.Heartbeat(None))

    def dies(self, reason: str = "killed") -> None:
        self.is_alive = False
        self._messages.put_nowait(EngineDeadError(reason))

    async def stop(self) -> None:
        self.is_alive = self.is_open = False

    kill = stop


class Machine:
    """Engines by replica; `may_start` holds restarts back, `broken` lets them fail."""

    def __init__(self) -> None:
        self.engines = [StubEngine(), StubEngine()]
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.broken = False

    async def relaunch(self, index: int) -> Any:
        await self.may_start.wait()
        if self.broken:
            raise EngineDeadError("no memory")
        self.engines[index] = StubEngine()
        return self.engines[index], wire.Ready(LIMITS, EngineStats(), 0.0)

    def holders(self, request_id: str) -> list[int]:
        """The replicas that have the first sequence of a request."""
        found = (i for i, engine in enumerate(self.engines) if f"{request_id}/0" in engine.live)
        return [i for i in found if self.engines[i].is_alive]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(replica_set, "DELAYS", (0.0,) * 5)
    return Machine()


def create(machine: Machine, tokenizer: PreTrainedTokenizerFast, **options: Any) -> AsyncEngine:
    return AsyncEngine(
        [(each, wire.Ready(LIMITS, EngineStats(), 0.0)) for each in machine.engines],  # type: ignore[misc]
        machine.relaunch,
        engine_config(max_num_seqs=4, data_parallel_size=2, **options),
        "stub",
        "llama",
        tokenizer,
        AdmissionLimits(6),
        None,
    )


@pytest_asyncio.fixture
async def engine(
    machine: Machine, byte_level_tokenizer: PreTrainedTokenizerFast
) -> AsyncIterator[AsyncEngine]:
    engine = create(machine, byte_level_tokenizer)
    yield engine
    machine.may_start.set()
    await engine.shutdown(0)


class Reader:
    """Reads a request from the beginning."""

    def __init__(
        self,
        engine: AsyncEngine,
        name: str,
        prompt: list[int] | None = None,
        *,
        n: int = 1,
        stream: bool = True,
    ) -> None:
        self.outputs: list[RequestOutput] = []
        params = SamplingParams(max_tokens=100, n=n)
        self._generation = engine.generate(name, prompt or [5], params, stream=stream)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> list[int]:
        async for output in self._generation:
            self.outputs.append(output)
        return [t for o in self.outputs for c in o.outputs for t in c.token_ids]


async def started(machine: Machine, *names: str) -> None:
    await until(lambda: all(machine.holders(name) for name in names))


async def test_requests_are_spread_and_prefixes_found(
    engine: AsyncEngine, machine: Machine
) -> None:
    long = list(range(100, 228))
    readers = [Reader(engine, "a", [*long, 1]), Reader(engine, "b", n=3)]
    await started(machine, "a", "b")
    assert machine.holders("a") == [0]
    assert sorted(machine.engines[1].live) == ["b/0", "b/1", "b/2"]  # n > 1 stays together
    readers += [Reader(engine, "c"), Reader(engine, "d"), Reader(engine, "e", [*long, 2])]
    await started(machine, "c", "d", "e")
    assert [machine.holders(name) for name in "cde"] == [[0], [0], [0]]
    for reader in readers:
        reader.task.cancel()
    await until(lambda: not any(each.live for each in machine.engines))
    assert sorted(machine.engines[1].aborted) == ["b/0", "b/1", "b/2"]
    assert [each.num_sequences for each in engine.replicas.living] == [0, 0]


async def test_what_nobody_has_read_is_tried_elsewhere(
    engine: AsyncEngine, machine: Machine
) -> None:
    """Streams that have begun fail; a whole answer begins anew, with the same seeds."""
    names = ["stream", "other", "fresh", "here", "whole"]
    readers = {name: Reader(engine, name) for name in names[:4]}
    readers["whole"] = Reader(engine, "whole", n=2, stream=False)
    await started(machine, *names)
    first, second = machine.engines
    lost = [name for name in names if machine.holders(name) == [0]]
    assert lost == ["stream", "fresh", "whole"]
    seeds = first.live
    first.says("stream/0", 7)
    first.says("whole/0", 8)
    first.says("whole/1", 9, ends=True)
    await until(lambda: readers["stream"].outputs)
    first.dies("killed by signal 9")
    with pytest.raises(EngineDeadError, match="signal 9"):
        await readers["stream"].task
    await until(lambda: "whole/1" in second.live)
    assert {i: second.live[i] for i in ("fresh/0", "whole/0")} == {
        i: seeds[i] for i in ("fresh/0", "whole/0")
    }
    assert engine.trouble is None
    for name, token in (("fresh/0", 1), ("whole/1", 2), ("whole/0", 3), ("other/0", 4)):
        second.says(name, token, ends=True)
    assert await readers["fresh"].task == [1]
    assert await readers["whole"].task == [3, 2]
    assert await readers["other"].task == [4]
    await until(lambda: len(engine.replicas.living) == 2)
    assert machine.engines[0] is not first
    assert not first.is_open
    # The new one takes part: it is the least loaded.
    Reader(engine, "next")
    await started(machine, "next")
    assert machine.holders("next") == [0]
    assert [each.num_restarts for each in engine.replicas.health] == [1, 0]
    assert engine.stats.num_generation_tokens == 20  # what the dead one has done counts
    assert engine.stats.num_running == 1


async def test_without_any_replica_requests_wait_for_one(
    engine: AsyncEngine, machine: Machine
) -> None:
    readers = [Reader(engine, name, stream=False) for name in "ab"]
    await started(machine, "a", "b")
    machine.may_start.clear()
    for each in machine.engines:
        each.dies()
    await until(lambda: not engine.replicas.living)
    assert engine.trouble == (
        "replica 0: restarting, since killed; replica 1: restarting, since killed"
    )
    with pytest.raises(EngineStuckError, match="replica 1: restarting"):
        await anext(engine.generate("late", [5], PARAMS))
    machine.may_start.set()
    await started(machine, "a", "b")
    for name in "ab":
        machine.engines[machine.holders(name)[0]].says(f"{name}/0", 3, ends=True)
    assert await asyncio.gather(*(reader.task for reader in readers)) == [[3], [3]]
    assert engine.trouble is None


async def test_a_request_that_kills_replicas_is_not_tried_for_ever(
    engine: AsyncEngine, machine: Machine
) -> None:
    reader = Reader(engine, "poison")
    for _ in range(MAX_TRIES):
        await started(machine, "poison")
        machine.engines[machine.holders("poison")[0]].dies("poisoned")
        await until(lambda: not machine.holders("poison"))
    with pytest.raises(EngineDeadError, match="poisoned"):
        await reader.task
    await until(lambda: len(engine.replicas.living) == 2)


async def test_giving_up(engine: AsyncEngine, machine: Machine) -> None:
    """One that cannot be started again is left out; with the last one all ends."""
    machine.broken = True
    machine.engines[0].dies()
    await until(lambda: "too often" in (engine.replicas.health[0].problem or ""))
    assert "no memory" in (engine.replicas.health[0].problem or "")
    assert engine.trouble is None
    readers = [Reader(engine, name) for name in "abc"]
    await started(machine, "a", "b", "c")
    assert len(machine.engines[1].live) == 3
    machine.engines[1].says("a/0", 4)
    await until(lambda: readers[0].outputs)
    machine.may_start.clear()
    machine.engines[1].dies("burnt")
    with pytest.raises(EngineDeadError, match="burnt"):
        await readers[0].task
    assert not readers[1].task.done()
    machine.may_start.set()
    assert "every replica failed too often" in await engine.wait_dead()
    assert not any(each.is_open for each in machine.engines)
    for reader in readers[1:]:
        with pytest.raises(EngineDeadError, match="every replica"):
            await reader.task
    with pytest.raises(EngineDeadError, match="every replica"):
        await anext(engine.generate("late", [5], PARAMS))


class Watch:
    """The second that replicas wait for before they look again: it passes when the test says."""

    def __init__(self) -> None:
        self._passed = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        assert seconds == 1
        await self._passed.wait()

    async def pass_a_second(self, *beating: StubEngine) -> None:
        """These engines are alive meanwhile."""
        for engine in beating:
            engine.beats()
        await settled()
        self._passed.set()
        self._passed = asyncio.Event()
        await settled()


async def settled() -> None:
    """All that is due in the event loop has happened."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_replica_that_does_not_answer(
    machine: Machine,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New requests avoid it; when it is given up, it is killed and its requests go elsewhere."""
    watch = Watch()
    loop = SimpleNamespace(**{**vars(asyncio), "sleep": watch.sleep})
    monkeypatch.setattr(replica, "asyncio", loop)
    engine = create(machine, byte_level_tokenizer)
    reader = Reader(engine, "a")
    await started(machine, "a")
    silent, other = machine.engines
    for second in range(1, 11):
        assert engine.replicas.health[0].problem is None, second
        await watch.pass_a_second(other)
    assert engine.replicas.health[0].problem == "the engine process is silent"
    assert engine.replicas.health[1].problem is None
    assert engine.trouble is None
    avoiding = [Reader(engine, name) for name in "bc"]
    await started(machine, "b", "c")
    assert [machine.holders(name) for name in "bc"] == [[1], [1]]
    for second in range(1, 20):
        assert silent.is_open, second
        await watch.pass_a_second(other)
    await watch.pass_a_second(other)
    await until(lambda: "a/0" in other.live)
    assert not silent.is_open
    silent.says("a/0", 66)  # too late: nobody listens
    other.says("a/0", 7, ends=True)
    assert await reader.task == [7]
    assert all(not each.task.done() for each in avoiding)
    await engine.shutdown(0)


async def test_limits_and_the_end_are_those_of_all(engine: AsyncEngine, machine: Machine) -> None:
    """8 run, 6 may wait."""
    readers = [Reader(engine, f"{i}", n=7) for i in range(2)]
    await started(machine, "0", "1")
    with pytest.raises(QueueFullError, match="6 sequences are waiting"):
        await anext(engine.generate("late", [5], PARAMS))
    down = asyncio.create_task(engine.shutdown(0.2))
    await asyncio.sleep(0)
    with pytest.raises(EngineShuttingDownError):
        await anext(engine.generate("late", [5], PARAMS))
    for reader in readers:
        await reader.task
        assert {c.finish_reason for c in reader.outputs[-1].outputs} == {"abort"}
    await down
    assert not any(each.is_open for each in machine.engines)


async def test_a_shutdown_while_a_replica_restarts(engine: AsyncEngine, machine: Machine) -> None:
    machine.may_start.clear()
    machine.engines[0].dies()
    await until(lambda: not machine.engines[0].is_open)
    await asyncio.wait_for(engine.shutdown(0), PATIENCE_SECONDS)
    machine.may_start.set()
    await asyncio.sleep(0.01)
    assert len(engine.replicas.living) == 1  # it was not started again


async def test_engines_that_share_experts_end_together(
    machine: Machine, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = create(machine, byte_level_tokenizer, enable_expert_parallel=True)
    readers = [Reader(engine, name) for name in "ab"]
    await started(machine, *"ab")
    machine.engines[0].dies("the device is lost")
    assert await engine.wait_dead() == "the device is lost"
    for reader in readers:
        with pytest.raises(EngineDeadError, match="the device is lost"):
            await reader.task
    assert engine.trouble == "the device is lost"
    await engine.shutdown(0)
    assert not any(each.is_open for each in machine.engines)
