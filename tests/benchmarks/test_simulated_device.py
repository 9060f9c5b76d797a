"""The engine around a device that is pretended: it begins a step when it is launched and the one
before it has ended, and takes 5 ms. Scheduling, inputs, sampling data and results are real.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import torch
from models import checkpoints
from spec_decode import draft_bench
from work import count_lines

from atom.batch import LaunchedStep, Lookahead, ScheduledBatch, StepOutput
from atom.config import EngineConfig
from atom.graphs.capture import ReexecuteBackend
from atom.messages import EngineRequest, SequenceOutput
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.step import planned_graphs
from atom.model_engine.step.step_graphs import StepGraphs
from atom.model_engine.worker import Worker
from atom.sampling_params import SamplingParams
from atom.spec_decode.proposers.base import NullProposer, Proposal, VerifiedStep
from atom.spec_decode.suffix_lookup import SuffixLookup

NUM_SEQS, CONTEXT, STEP_SECONDS = 64, 128, 0.005
# The null model says nothing else.
TOKEN = 7
WARMUP_STEPS = 4
# Of Python for a step of all sequences, half as many again as it was (CPython 3.11).
HOST_LINES = 23000


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
        host: lines of Python that the host executed in each of these steps, where they are counted.
    """

    def __init__(self, inner: Any, clock: FakeClock) -> None:
        self._inner = inner
        self._clock = clock
        self._free_at = 0.0
        self.begins: list[float] = []
        self.events: list[tuple[str, int]] = []
        self.num_tokens = 0
        self.host: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        launched = self._inner.launch(batch)
        self._clock.work()
        number = len(self.begins)
        self.events.append(("launch", number))
        self.begins.append(max(self._clock.now(), self._free_at))
        self._free_at = end = self.begins[-1] + STEP_SECONDS

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
        return (len(begins) - 1) * STEP_SECONDS / (begins[-1] - begins[0])

    @property
    def launches_ahead(self) -> bool:
        """Whether every step was launched before the results of the one before it were read."""
        places = {event: place for place, event in enumerate(self.events)}
        last = self.events[-1][1]
        return all(places["launch", n + 1] < places["read", n] for n in range(1, last))


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
    clock: FakeClock,
    depth: int,
    kind: str,
    steps: int,
    num_waiting: int = 0,
    counts: bool = False,
) -> PretendedDevice:
    """All sequences decode, `steps` times at least.

    Args:
        kind: where drafts come from.
        num_waiting: of the sequences, those that wait for their results.
        counts: count what the host does.
    """
    options = options_of(kind)
    inner = benchmark.NullExecutor(
        num_seqs=NUM_SEQS, context=CONTEXT, depth=depth, vocab_size=64, **options
    )
    device = PretendedDevice(inner, clock)
    config = engine_config(max_num_batched_tokens=NUM_SEQS * CONTEXT, max_num_seqs=NUM_SEQS)
    numbers = decode(EngineCore(config, device), device, steps, num_waiting, counts)
    assert numbers == ({1, 2, 3, 4} if kind == "ragged" else {4} if kind == "drafts" else {1})
    return device


def decode(
    core: EngineCore, device: PretendedDevice, steps: int, num_waiting: int, counts: bool
) -> set[int]:
    """All sequences, so many steps -> the numbers of tokens that a sequence got in a step."""
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
        outputs = counted_step(core, device) if counts else core.step().outputs
        device.num_tokens += sum(len(output.token_ids) for output in outputs)
        assert num_waiting or len(outputs) == NUM_SEQS
        numbers.update(len(output.token_ids) for output in outputs)
    core.shutdown()
    return numbers


def counted_step(core: EngineCore, device: PretendedDevice) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    device.host.append(count_lines(lambda: outputs.extend(core.step().outputs)))
    return outputs


class IdleBackend(ReexecuteBackend):
    """Graphs whose replay does nothing."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        super().capture(work)
        return lambda: None


def graphed_worker(config: EngineConfig, patch: pytest.MonkeyPatch) -> Worker:
    """Its graphs, which compute nothing, find that the sample is `TOKEN` and all drafts are
    accepted.
    """
    with patch.context() as context:
        context.setattr(planned_graphs, "capture_backend", lambda _: IdleBackend())
        worker = Worker(config)
    graphs = worker._runner.steps
    assert isinstance(graphs, StepGraphs)
    with torch.inference_mode():
        for key, kept in graphs._captured._kept.items():
            if key.stage != "choose":
                continue
            tokens, accepted, _ = kept
            tokens.fill_(TOKEN)
            accepted.fill_(key.query_len - 1)
    return worker


def write_models(folder: Path, k: int) -> dict[str, Any]:
    """A tiny target, with an Eagle3 draft for k drafts -> the options that name them."""
    sizes = {"vocab_size": 64, "hidden_size": 48, "max_position_embeddings": 8192}
    checkpoints.llama(folder / "target", **sizes)
    options = {"model": str(folder / "target")}
    if not k:
        return options
    raw = {**draft_bench.MHA, **sizes}
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    draft = draft_bench.write_draft(folder / "draft", raw, draft_bench.draft_tensors(raw))
    return {**options, "method": "eagle3", "draft_model": str(draft), "num_speculative_tokens": k}


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
    """In every step, behind a device that takes three times as long as the host does as a rule."""
    plain = run(benchmark, FakeClock(), 1, kind, 40)
    ahead = run(benchmark, FakeClock(), 2, kind, 100, counts=True)
    assert max(ahead.host) < 3 * median(ahead.host)
    assert ahead.busy > plain.busy
    assert ahead.launches_ahead
    assert plain.events[:4] == [("launch", 0), ("read", 0), ("launch", 1), ("read", 1)]


@pytest.mark.parametrize("k", [0, 3])
def test_a_host_with_graphs_is_hidden(
    k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the host does for a step on graphs, but the driver's launches: the choice of the
    graphs, staging where they read, tokens and drafts taken from the step before and left for the
    next one, and an Eagle3 proposer's part. Its work is counted, since time is another on each
    machine.
    """
    config = engine_config(
        **write_models(tmp_path, k),
        dtype="float32",
        block_size=64,
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=NUM_SEQS * CONTEXT,
        kv_cache_memory="64MB",
        num_threads=1,
        overlap=True,
        cudagraph_capture_sizes=[NUM_SEQS],
    )
    worker = graphed_worker(config, monkeypatch)
    device = PretendedDevice(worker, FakeClock())
    core = EngineCore(config, device)
    assert decode(core, device, 100, 0, counts=True) == {k + 1}
    assert fmean(device.host) < HOST_LINES
    assert device.busy > 0.999
    assert device.launches_ahead
    stats = core.stats
    assert stats.num_decode_steps > 100
    assert stats.num_replayed_decode_steps == stats.num_decode_steps
    assert stats.num_replayed_choice_steps == stats.num_decode_steps
    assert stats.num_replayed_draft_steps == (stats.num_decode_steps if k else 0)


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
