"""What graphs read and write is there as long as they are replayed."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs.pretended_graphs import GraphError, pretend_graphs, pretend_kernels
from spec_decode import engines
from spec_decode.engines import PROMPTS, create_engine, params
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams, StructuredOutput
from atom.entrypoints.llm import GenerationError
from atom.graphs.capture import CaptureBackend, CudaGraphBackend
from atom.model_engine.step import planned_graphs


class ForgettingBackend:
    """A `CudaGraphBackend` whose graphs do not keep their work."""

    def __init__(self) -> None:
        self._inner = CudaGraphBackend()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        known = [work]
        replay = self._inner.capture(lambda: known[0]())
        known.clear()
        return replay


class CountingBackend:
    """Counts replays by what was captured, the kind of its key."""

    def __init__(self, inner: CaptureBackend) -> None:
        self._inner = inner
        self.replays: Counter[str] = Counter()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        assert isinstance(work, partial)
        kind, repeat = work.args[0].stage, self._inner.capture(work)

        def replay() -> None:
            repeat()
            self.replays[kind] += 1

        return replay


class TestPretendedGraphs:
    @pytest.fixture(autouse=True)
    def pretended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend_graphs(monkeypatch)

    def test_a_replay_computes_what_was_captured(self) -> None:
        source, target = torch.arange(6.0), torch.zeros(2, 3)

        def work() -> None:
            halves = (source.view(2, 3) * 2).unbind()
            torch._foreach_copy_([target[0], target[1]], [halves[1], halves[0] + 1])

        replay = CudaGraphBackend().capture(work)
        for first in (5.0, 7.0):
            source.copy_(torch.arange(first, first + 6))
            target.zero_()
            replay()
            expected = source.view(2, 3) * 2
            assert torch.equal(target, torch.stack((expected[1], expected[0] + 1)))

    def test_memory_that_only_the_work_refers_to(self) -> None:
        """Graphs keep it; those that did not would read what is written there next."""
        target, held = torch.zeros(3), torch.arange(3.0)
        kept = weakref.ref(held)

        def work(source: torch.Tensor) -> None:
            target.copy_(source + 1)

        replay = CudaGraphBackend().capture(partial(work, held))
        del held
        target.zero_()
        replay()
        assert target.tolist() == [1, 2, 3]
        del replay
        assert kept() is None
        forgetting = ForgettingBackend().capture(partial(work, torch.arange(3.0)))
        with pytest.raises(GraphError, match=r"memory that was freed: aten.add.Tensor with \(3,\)"):
            forgetting()

    def test_memory_that_was_replaced(self) -> None:
        """The work is kept, but it finds another tensor by then; so would the host's writes."""
        places = {"target": torch.zeros(3)}

        def work() -> None:
            places["target"].add_(1)

        replay = CudaGraphBackend().capture(work)
        replay()
        assert places["target"].tolist() == [3, 3, 3]
        places["target"].resize_(1 << 16)
        with pytest.raises(GraphError, match="memory that has moved"):
            replay()
        places["target"] = torch.zeros(3)
        with pytest.raises(GraphError, match="memory that was freed"):
            replay()

    def test_what_a_device_would_not_capture(self) -> None:
        source, left = torch.arange(3), list[torch.Tensor]()

        def ask() -> None:
            source.fill_(int(source.sum()))

        with pytest.raises(GraphError, match="asks the device for a number"):
            CudaGraphBackend().capture(ask)
        with pytest.raises(GraphError, match=r"stays in the graph's pool: aten\.mul"):
            CudaGraphBackend().capture(lambda: left.append(source * 2))


GRAMMAR = StructuredOutput.regex("[a-f0-9]{20}")
ALONE = ("greedy", "warm", "top-k min-p", "top-p")
# All sequences of a step in one way, and in all of them.
WISHES: dict[str, list[SamplingParams]] = {
    name: [params(name, max_tokens=8, seed=1)] * 4 for name in ALONE
}
WISHES["all"] = [
    *(params(name, max_tokens=8, seed=2) for name in engines.SETTINGS),
    params("greedy", max_tokens=8, seed=2, structured_output=GRAMMAR, ignore_eos=False),
    params("warm", max_tokens=8, logprobs=2, logit_bias={3: 4.0}),
]
# Target, draft, options.
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "no drafts": ("llama", None, {}),
    "eagle3": ("llama", "mha", {}),
    "eagle3 ahead": ("llama", "mha", {"overlap": True}),
    "eagle3 adaptive": ("llama", "mha", {"speculative_adaptive": True}),
    "eagle3 at random": ("llama", "mha", {"speculative_synthetic_acceptance_length": 2.5}),
    "parallel": ("llama", "peagle", {}),
    "block": ("llama", "dflash2", {}),
    "block and chain": ("llama", "dspark", {}),
    "latents": ("deepseek_v3", "mla", {}),
    "own layers": ("deepseek_v3", "mtp", {}),
    "draft model": ("llama", "model", {}),
    "draft model of latents": ("deepseek_v3", "model", {}),
}
# Each of them is a part of others: of those with options, of a block with a chain, and of a target
# of latents with layers of its own.
PARTS = ("no drafts", "eagle3", "parallel", "block", "latents", "draft model of latents")


class Bench:
    """Checkpoints, and engines whose ops are those of plain torch."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self._folders = engines.Folders(folder, tokenizer)

    def engine(self, target: str, draft: str | None, **options: Any) -> LLM:
        if draft is not None:
            options |= self._folders.speculation(draft)
        return create_engine(self._folders(target), max_num_seqs=8, **options)

    def graphed(
        self, patch: pytest.MonkeyPatch, backend: type[CaptureBackend], *what: Any, **options: Any
    ) -> tuple[LLM, Counter[str]]:
        """An engine whose steps are replayed, and the counts of its replays."""
        with patch.context() as context:
            pretend_graphs(context)
            counting = CountingBackend(backend())
            context.setattr(planned_graphs, "capture_backend", lambda _: counting)
            engine = self.engine(*what, cudagraph_capture_sizes=[1, 8], **options)
        gc.collect()
        return engine, counting.replays


@pytest.fixture(scope="module")
def bench(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Bench:
    return Bench(tmp_path_factory.mktemp("memory of graphs"), byte_level_tokenizer)


def generate(engine: LLM, wishes: list[SamplingParams]) -> list[list[int]]:
    outputs = engine.generate(PROMPTS[1 : 1 + len(wishes)], wishes, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in PARTS else ()) for case in CASES],
)
def test_an_engine_replays_what_is_there(
    case: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graphs know addresses alone, and it generates what one without graphs does."""
    pretend_kernels(monkeypatch)
    target, draft, options = CASES[case]
    eager = bench.engine(target, draft, enforce_eager=True, **options)
    engine, replays = bench.graphed(monkeypatch, CudaGraphBackend, target, draft, **options)
    assert not replays
    for name, every in WISHES.items():
        # No grammar could hold against drafts that are accepted at random.
        at_random = "speculative_synthetic_acceptance_length" in options
        wishes = [w for w in every if w.structured_output is None or not at_random]
        assert generate(engine, wishes) == generate(eager, wishes), name
        assert replays["target"] >= 3, name
        if name in ALONE:  # else the host has a say in tokens, and in drafts
            assert replays["choose"] >= 3, name
            assert (replays["draft"] >= 3) == (draft is not None), name
        replays.clear()


@pytest.mark.parametrize("case", ["no drafts", "eagle3"])
def test_graphs_that_forget_their_work_are_noticed(
    case: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of what a graph of a choice reads is nowhere else: the places of its rows."""
    pretend_kernels(monkeypatch)
    target, draft, options = CASES[case]
    engine, _ = bench.graphed(monkeypatch, ForgettingBackend, target, draft, **options)
    with pytest.raises(GenerationError, match="memory that was freed"):
        generate(engine, WISHES["greedy"])
