"""The engine around a device that is pretended: it begins a step when it is launched and the one
before it has ended, and takes 5 ms, or longer on a machine whose host is slow. Scheduling, inputs,
sampling data and results are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from atom.batch import LaunchedStep, ScheduledBatch, StepOutput
from atom.messages import EngineRequest
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.engine_core import EngineCore
from atom.sampling_params import SamplingParams

NUM_SEQS, CONTEXT, STEP_SECONDS = 64, 128, 0.005


class OwnClock:
    """The time that this thread works or waits: other programs take none of it."""

    def __init__(self) -> None:
        self._waited = 0.0

    def now(self) -> float:
        return time.thread_time() + self._waited

    def wait_until(self, when: float) -> None:
        self._waited += max(when - self.now(), 0.0)

    def work(self) -> None:
        """The host's time passes by itself."""


class FakeClock:
    """The host needs 4 ms a step, whatever it does."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)

    def work(self) -> None:
        self._now += 0.004


class PretendedDevice:
    """An executor whose results arrive when the device would have them.

    Attributes:
        begins: when each step begins on the device, seconds.
        events: launches and readings of results, by the step's number.
    """

    def __init__(self, inner: Any, clock: OwnClock | FakeClock, seconds: float) -> None:
        self._inner = inner
        self._clock = clock
        self._seconds = seconds
        self._free_at = 0.0
        self.begins: list[float] = []
        self.events: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        launched = self._inner.launch(batch)
        self._clock.work()
        number = len(self.begins)
        self.events.append(("launch", number))
        self.begins.append(max(self._clock.now(), self._free_at))
        self._free_at = end = self.begins[-1] + self._seconds

        def collect() -> StepOutput:
            self.events.append(("read", number))
            self._clock.wait_until(end)
            output: StepOutput = launched.collect()
            return output

        return LaunchedStep(collect, launched.num_drafts, launched.draft_source)

    def busy(self, steps: int) -> float:
        """The device's share of the time, in the best run of so many steps."""
        spans = zip(self.begins[2:], self.begins[2 + steps :], strict=False)
        return steps * self._seconds / min(last - first for first, last in spans)

    @property
    def shortest(self) -> float:
        """Seconds from one step's beginning to the next one's."""
        return min(b - a for a, b in zip(self.begins[3:], self.begins[4:], strict=False))


def run(
    benchmark: Any,
    clock: OwnClock | FakeClock,
    depth: int,
    num_drafts: int,
    steps: int,
    seconds: float = STEP_SECONDS,
) -> PretendedDevice:
    """All sequences decode, `steps` times at least, in so many seconds of the device each."""
    inner = benchmark.NullExecutor(NUM_SEQS, num_drafts, CONTEXT, depth, vocab_size=64)
    device = PretendedDevice(inner, clock, seconds)
    config = engine_config(max_num_batched_tokens=NUM_SEQS * CONTEXT, max_num_seqs=NUM_SEQS)
    core = EngineCore(config, device)
    for i in range(NUM_SEQS):
        params = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0.8)
        prompt = [5] * (CONTEXT - 1)
        core.add_request(EngineRequest(id=str(i), prompt_token_ids=prompt, params=params, seed=i))
    for _ in range(3):
        core.step()
    for _ in range(steps):
        report = core.step()
        assert [len(o.token_ids) for o in report.outputs] == [num_drafts + 1] * NUM_SEQS
    core.shutdown()
    return device


@pytest.fixture
def benchmark(benchmark_module: Callable[[str], Any]) -> Any:
    return benchmark_module("host_overhead")


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_host_is_hidden(benchmark: Any, num_drafts: int) -> None:
    """A host that needs less time than the device takes none."""
    assert run(benchmark, FakeClock(), 2, num_drafts, 20).busy(18) > 0.999
    assert run(benchmark, FakeClock(), 1, num_drafts, 20).busy(18) == pytest.approx(5 / 9)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_our_host_is_hidden(benchmark: Any, num_drafts: int) -> None:
    """By the time that this thread works, which other programs lengthen little."""
    host = run(benchmark, OwnClock(), 2, num_drafts, 60, seconds=0.0).shortest
    assert host < STEP_SECONDS
    seconds = max(STEP_SECONDS, 2 * host)
    ahead = run(benchmark, OwnClock(), 2, num_drafts, 100, seconds)
    plain = run(benchmark, OwnClock(), 1, num_drafts, 40, seconds)
    assert ahead.busy(15) >= 0.97 > plain.busy(15)
    places = {event: place for place, event in enumerate(ahead.events)}
    last = ahead.events[-1][1]
    assert all(places["launch", n + 1] < places["read", n] for n in range(1, last))
    assert plain.events[:4] == [("launch", 0), ("read", 0), ("launch", 1), ("read", 1)]
