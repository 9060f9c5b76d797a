"""The engine around a device that is pretended: it begins a step when it is launched and the one
before it has ended, and takes 5 ms. Scheduling, inputs, sampling data and results are real.
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
    """

    def __init__(self, inner: Any, clock: OwnClock | FakeClock) -> None:
        self._inner = inner
        self._clock = clock
        self._free_at = 0.0
        self.begins: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        launched = self._inner.launch(batch)
        self._clock.work()
        self.begins.append(max(self._clock.now(), self._free_at))
        self._free_at = end = self.begins[-1] + STEP_SECONDS

        def collect() -> StepOutput:
            self._clock.wait_until(end)
            output: StepOutput = launched.collect()
            return output

        return LaunchedStep(collect, launched.num_drafts, launched.draft_source)

    def busy(self, steps: int) -> float:
        """The device's share of the time, in the best run of so many steps."""
        spans = zip(self.begins[2:], self.begins[2 + steps :], strict=False)
        return steps * STEP_SECONDS / min(last - first for first, last in spans)


def run(
    benchmark: Any, clock: OwnClock | FakeClock, depth: int, num_drafts: int, steps: int
) -> PretendedDevice:
    """All sequences decode, `steps` times at least."""
    inner = benchmark.NullExecutor(NUM_SEQS, num_drafts, CONTEXT, depth, vocab_size=64)
    device = PretendedDevice(inner, clock)
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
    ahead = run(benchmark, OwnClock(), 2, num_drafts, 150).busy(15)
    plain = run(benchmark, OwnClock(), 1, num_drafts, 60).busy(15)
    assert ahead >= 0.97 > plain
