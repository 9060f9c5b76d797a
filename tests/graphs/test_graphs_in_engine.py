"""Engines that replay graphs say what engines that do not say, with and without speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from spec_decode import engines
from spec_decode.engines import PROMPTS, Folders, create_engine, generate, params

from atom import LLM
from atom.batch import LaunchedStep, ScheduledBatch
from atom.config import ConfigError
from atom.graphs.capture import ReexecuteBackend
from atom.model_engine import worker
from atom.model_engine.step import planned_graphs
from atom.model_ops.attention.mha import Attention

SETTINGS = ("greedy", "penalties")
METHODS = ["mha", "mla", "mtp", "peagle", "suffix"]


class CountingBackend(ReexecuteBackend):
    """Counts replays by what was captured, the kind of its key."""

    def __init__(self) -> None:
        self.replays: Counter[str] = Counter()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        assert isinstance(work, partial)
        kind = work.args[0].stage
        repeat = super().capture(work)

        def replay() -> None:
            self.replays[kind] += 1
            repeat()

        return replay


def graphed_engine(patch: pytest.MonkeyPatch, folder: Path, **options: Any) -> tuple[LLM, Counter]:
    """An engine whose steps are replayed, and the counts of its replays."""
    backend = CountingBackend()
    with patch.context() as context:
        context.setattr(planned_graphs, "capture_backend", lambda _: backend)
        engine = create_engine(folder, **options)
    assert not backend.replays
    return engine, backend.replays


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_tokens_of_graphs(
    kind: str,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every method through graphs gives the tokens of eager steps without speculation."""
    target = folders(kind)
    eager = create_engine(target)
    expected = {name: generate(eager, params(name)) for name in SETTINGS}
    engine, replays = graphed_engine(monkeypatch, target)
    assert {name: generate(engine, params(name)) for name in SETTINGS} == expected
    assert replays["target"] >= 20
    stats = engine.engine.core.stats
    assert replays["target"] >= stats.num_replayed_decode_steps
    assert 20 <= stats.num_replayed_decode_steps == stats.num_decode_steps < stats.num_steps
    assert stats.num_draft_steps == 0
    for method in METHODS:
        if (kind, method) in (("llama", "mtp"), ("llama", "mla"), ("deepseek_v3", "peagle")):
            continue
        if kind == "glm_moe_dsa" and method not in ("mtp", "suffix"):
            continue
        options = folders.speculation(method, 3)
        engine, replays = graphed_engine(monkeypatch, target, **options)
        assert {name: generate(engine, params(name)) for name in SETTINGS} == expected, method
        # A lookup proposes different numbers of drafts, and nothing of it is captured.
        assert replays["target"] >= (1 if method == "suffix" else 10), method
        assert (replays["draft"] > 20) == (method != "suffix")


@pytest.mark.parametrize(
    ("kind", "method", "overlap"),
    [
        ("llama", "mha", False),
        ("llama", "mha", True),
        ("llama", "dspark", False),
        ("llama", "peagle", False),
        ("deepseek_v3", "mla", False),
        ("deepseek_v3", "mtp", False),
    ],
)
def test_a_captured_chain_proposes_the_same_drafts(
    kind: str,
    method: str,
    overlap: bool,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = folders(kind)
    options = folders.speculation(method, 5)
    options |= {"max_num_seqs": 5, "overlap": overlap}
    with engines.drafts_recorded(monkeypatch) as recorders:
        eager = create_engine(target, **options)
        graphed, replays = graphed_engine(
            monkeypatch, target, cudagraph_capture_sizes=[1, 4], **options
        )
    sampling = params("warm", max_tokens=10)
    assert generate(graphed, sampling, PROMPTS[:7]) == generate(eager, sampling, PROMPTS[:7])
    assert replays["draft"] > 0
    assert recorders[0] == recorders[1]
    graphed.shutdown()
    ended = graphed.engine.core.executor
    graphs = ended.parts.graphs.captured
    assert not graphs._replays, "communicators cannot end while graphs hold them"


@pytest.mark.parametrize(("method", "overlap"), [("mha", None), ("mha", True), ("suffix", None)])
def test_contexts_as_long_as_any_have_graphs(
    method: str,
    overlap: bool | None,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding behind their last rows reaches beyond `max_model_len`, which fills its blocks."""
    target = folders("llama")
    prompts, sampling = [PROMPTS[n] for n in (2, 4, 12)], params("warm", max_tokens=None)
    expected = generate(create_engine(target, max_model_len=40), sampling, prompts)
    assert [len(p) + len(t) for p, t in zip(prompts, expected, strict=True)] == [40] * 3
    options = folders.speculation(method, 3)
    engine, replays = graphed_engine(
        monkeypatch, target, max_model_len=40, overlap=overlap, **options
    )
    assert generate(engine, sampling, prompts) == expected
    stats = engine.engine.core.stats
    assert replays["target"] == stats.num_replayed_decode_steps == stats.num_decode_steps
    assert stats.num_decode_steps == stats.num_steps - 1


@pytest.mark.parametrize("k", [0, 3])
def test_steps_are_counted_by_what_they_compute(
    k: int,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in parts, beside sequences that decode. A prompt of one token fits their graphs."""
    prompts = [*PROMPTS, [5]]
    target = folders("llama")
    options = folders.speculation("mha", k) if k else {}
    limits = {"max_num_batched_tokens": 20, "max_num_seqs": 4, "enable_prefix_caching": False}
    engine, replays = graphed_engine(monkeypatch, target, **limits, **options)
    executor = engine.engine.core.executor
    assert isinstance(executor, worker.Worker)
    counts, replayed, launch = Counter[str](), list[bool](), executor.launch

    def counting(batch: ScheduledBatch) -> LaunchedStep:
        lens = [len(prompts[int(s.id.partition("/")[0]) % len(prompts)]) for s in batch.sequences]
        decode = [s.start >= n for s, n in zip(batch.sequences, lens, strict=True)]
        counts["steps" if not any(decode) else "decode" if all(decode) else "mixed"] += 1
        replayed.append(all(len(s.token_ids) == s.num_drafts + 1 for s in batch.sequences))
        return launch(batch)

    executor.launch = counting  # type: ignore[method-assign]
    generate(engine, params("warm"), prompts)
    assert counts["mixed"] >= 3
    values = {metric.name: metric.value for metric in engine.get_metrics()}
    assert values["atom:steps"] == counts.total()
    assert values["atom:mixed_steps"] == counts["mixed"]
    assert values["atom:decode_steps"] == counts["decode"]
    assert values["atom:replayed_decode_steps"] == counts["decode"]
    assert values["atom:replayed_choice_steps"] == counts["decode"]
    assert replays["choose"] == sum(replayed) > counts["decode"]
    generate(engine, params("greedy", logprobs=1), PROMPTS[:2])
    later = {metric.name: metric.value for metric in engine.get_metrics()}
    assert later["atom:replayed_choice_steps"] == values["atom:replayed_choice_steps"]
    assert later["atom:replayed_decode_steps"] > values["atom:replayed_decode_steps"]


def test_padding_leaves_the_pool_alone(
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three sequences in buckets of four: the caches of both engines hold the same."""
    target = folders("llama")
    options = folders.speculation("mha", 3)
    eager = create_engine(target, **options)
    graphed, _ = graphed_engine(monkeypatch, target, cudagraph_capture_sizes="4", **options)
    for engine in (eager, graphed):
        generate(engine, params("greedy", max_tokens=9), PROMPTS[:3])
    expected, found = (_pools(engine) for engine in (eager, graphed))
    assert len(found) == 4  # keys and values of the target's three layers and of the draft
    for pool, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(pool, reference, atol=1e-5, rtol=1e-5)
        assert not pool[reference == 0].any()


def _pools(engine: LLM) -> list[torch.Tensor]:
    runner = engine.engine.core.executor
    assert isinstance(runner, worker.Worker)
    models = (runner.parts.model, runner.parts.proposer.draft_model)
    return [
        torch.stack((module.kv_cache.key, module.kv_cache.value))
        for model in models
        for module in model.modules()
        if isinstance(module, Attention)
    ]


def test_eager_engines_capture_nothing(tiny_llama_dir: Path) -> None:
    def never(*_: object) -> None:
        raise AssertionError("captured")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_graphs, "capture_backend", never)
        create_engine(tiny_llama_dir, enforce_eager=True)


def test_sizes_are_refused_where_nothing_is_captured(tiny_llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"cudagraph_capture_sizes=\[1, 2\] has no effect"):
        create_engine(tiny_llama_dir, device="cpu", cudagraph_capture_sizes="1,2")
