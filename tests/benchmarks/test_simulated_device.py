"""The engine around a device that is pretended: it begins a step when it is launched and the one
before it has ended, and takes 5 ms. Scheduling, inputs, sampling data and results are real.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch

from atom.batch import LaunchedStep, ScheduledBatch, StepOutput
from atom.messages import EngineRequest
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.engine_core import EngineCore
from atom.sampling_params import SamplingParams
from atom.spec_decode.base import Lookahead, NullProposer, Proposal, VerifiedStep
from atom.spec_decode.suffix_lookup import SuffixLookup

NUM_SEQS, CONTEXT, STEP_SECONDS = 64, 128, 0.005
# The null model says nothing else.
TOKEN = 7
WARMUP_STEPS = 4


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
    """The host needs so many seconds a step, whatever it does."""

    def __init__(self, host: float = 0.004) -> None:
        self._host = host
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)

    def work(self) -> None:
        self._now += self._host


class PretendedDevice:
    """An executor whose results arrive when the device would have them.

    Attributes:
        begins: when each step begins on the device, seconds.
        events: launches and readings of results, by the step's number.
        num_tokens: that all sequences got, once they decode.
    """

    def __init__(
        self, inner: Any, clock: OwnClock | FakeClock, step_seconds: float = STEP_SECONDS
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._step_seconds = step_seconds
        self._free_at = 0.0
        self.begins: list[float] = []
        self.events: list[tuple[str, int]] = []
        self.num_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        launched = self._inner.launch(batch)
        self._clock.work()
        number = len(self.begins)
        self.events.append(("launch", number))
        self.begins.append(max(self._clock.now(), self._free_at))
        self._free_at = end = self.begins[-1] + self._step_seconds

        def collect() -> StepOutput:
            self.events.append(("read", number))
            self._clock.wait_until(end)
            output: StepOutput = launched.collect()
            return output

        return LaunchedStep(collect, launched.num_drafts, launched.draft_source)

    @property
    def busy(self) -> float:
        """The device's share of the time, once all sequences decode."""
        begins = self.begins[WARMUP_STEPS:]
        return (len(begins) - 1) * self._step_seconds / (begins[-1] - begins[0])

    @property
    def host_seconds(self) -> float:
        """What the host needed for a step, while nothing overlapped; the median."""
        gaps = [b - a for a, b in pairwise(self.begins[WARMUP_STEPS:])]
        return median(gaps) - self._step_seconds


class RaggedProposer(NullProposer):
    """Drafts what will be said, up to any token: sequences accept none to all of them."""

    reads_steps = True

    def __init__(self) -> None:
        super().__init__(Lookahead(3))
        self._generator = torch.Generator().manual_seed(0)

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        shape = len(step.last_rows), 1
        num_right = torch.randint(num_drafts + 1, shape, generator=self._generator)
        wrong = torch.arange(num_drafts) >= num_right
        return Proposal(torch.where(wrong, TOKEN + 1, TOKEN))


class NewTokens:
    """Chooses tokens that nobody has said before."""

    def __init__(self) -> None:
        self._next = 100

    def __call__(self, scores: torch.Tensor, _: object) -> torch.Tensor:
        first = self._next
        self._next += len(scores)
        return torch.arange(first, self._next)


def options_of(kind: str) -> dict[str, Any]:
    """Of the `NullExecutor`."""
    if kind == "ragged":
        return {"num_drafts": 3, "proposer": RaggedProposer()}
    if kind == "lookup":
        return {"num_drafts": 3, "lookup": SuffixLookup("lookup", 3), "choose": NewTokens()}
    return {"num_drafts": 3 if kind == "drafts" else 0}


def run(
    benchmark: Any,
    clock: OwnClock | FakeClock,
    depth: int,
    kind: str,
    steps: int,
    num_waiting: int = 0,
    step_seconds: float = STEP_SECONDS,
) -> PretendedDevice:
    """All sequences decode, `steps` times at least.

    Args:
        kind: where drafts come from.
        num_waiting: of the sequences, those that wait for their results.
        step_seconds: the device's.
    """
    options = options_of(kind)
    inner = benchmark.NullExecutor(
        num_seqs=NUM_SEQS, context=CONTEXT, depth=depth, vocab_size=64, **options
    )
    device = PretendedDevice(inner, clock, step_seconds)
    config = engine_config(max_num_batched_tokens=NUM_SEQS * CONTEXT, max_num_seqs=NUM_SEQS)
    core = EngineCore(config, device)
    for i in range(NUM_SEQS):
        params = SamplingParams(
            max_tokens=4000,
            ignore_eos=True,
            temperature=0.8,
            bad_word_ids=[[1]] if i < num_waiting else None,
        )
        prompt = [5] * (CONTEXT - 1)
        core.add_request(EngineRequest(id=str(i), prompt_token_ids=prompt, params=params, seed=i))
    for _ in range(WARMUP_STEPS):
        core.step()
    numbers: set[int] = set()
    for _ in range(steps):
        outputs = core.step().outputs
        device.num_tokens += sum(len(output.token_ids) for output in outputs)
        assert num_waiting or len(outputs) == NUM_SEQS
        numbers.update(len(output.token_ids) for output in outputs)
    assert numbers == ({1, 2, 3, 4} if kind == "ragged" else {4} if kind == "drafts" else {1})
    core.shutdown()
    return device


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """As an engine's process does, once it is ready."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def benchmark(benchmark_module: Callable[[str], Any]) -> Any:
    return benchmark_module("host_overhead")


KINDS = ["none", "drafts", "ragged", "lookup"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_is_hidden(benchmark: Any, kind: str) -> None:
    """A host that needs less time than the device takes none."""
    assert run(benchmark, FakeClock(), 2, kind, 20).busy > 0.999
    assert run(benchmark, FakeClock(), 1, kind, 20).busy == pytest.approx(5 / 9)


@pytest.mark.parametrize("kind", KINDS)
def test_our_host_is_hidden(benchmark: Any, kind: str) -> None:
    """In every step, by the time that this thread works, which other programs lengthen little: it
    is a third of the device's on a machine of two slow processors. On a slower one the device is
    as much slower.
    """
    plain = run(benchmark, OwnClock(), 1, kind, 40)
    step_seconds = max(STEP_SECONDS, 3 * plain.host_seconds)
    ahead = run(benchmark, OwnClock(), 2, kind, 100, step_seconds=step_seconds)
    assert ahead.busy >= 0.97
    assert ahead.busy > plain.busy
    places = {event: place for place, event in enumerate(ahead.events)}
    last = ahead.events[-1][1]
    assert all(places["launch", n + 1] < places["read", n] for n in range(1, last))
    assert plain.events[:4] == [("launch", 0), ("read", 0), ("launch", 1), ("read", 1)]


@pytest.mark.parametrize(("num_waiting", "overlaps"), [(21, True), (22, False)])
def test_as_many_may_wait_as_pay(benchmark: Any, num_waiting: int, overlaps: bool) -> None:
    """Who waits runs in every other step: a third of the sequences costs a sixth of the tokens,
    and a host that works for a fifth of the device's time costs a sixth of the time.
    """
    clock = FakeClock(STEP_SECONDS / 5)
    device = run(benchmark, clock, 2, "none", 40, num_waiting=num_waiting)
    rate = device.num_tokens / 40 / NUM_SEQS
    assert rate == (pytest.approx(1 - num_waiting / NUM_SEQS / 2) if overlaps else 1)
    assert device.busy == (pytest.approx(1) if overlaps else pytest.approx(5 / 6))
    assert rate * device.busy == pytest.approx(5 / 6, abs=0.01)
