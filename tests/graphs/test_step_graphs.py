"""What a step that decodes launches beside its graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from spec_decode import engines
from spec_decode.engines import PROMPTS, create_engine, generate, params
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.batch import LaunchedStep, ScheduledBatch
from atom.graphs.capture import ReexecuteBackend
from atom.model_engine.step import planned_graphs, step_graphs
from atom.model_engine.worker import Worker
from atom.sampling.plan import KINDS
from atom.sampling.rows import SamplingRows
from atom.sampling_params import Needs

NUM_SEQS = 4
NO_LAUNCH = ("empty", "new_empty", "empty_strided", "empty_like", "new_empty_strided")


class Launches(TorchDispatchMode):
    """Counts operations that launch something, those within replays once for each replay."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.is_replaying = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if not self.is_replaying and name not in NO_LAUNCH and not _is_view(func, args, result):
            self.counts[name] += 1
        return result


def _is_view(func: Any, args: Any, result: Any) -> bool:
    if func._schema.is_mutable or not isinstance(result, torch.Tensor):
        return not func._schema.is_mutable
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return any(leaf.untyped_storage()._cdata == result.untyped_storage()._cdata for leaf in given)


class WatchedBackend(ReexecuteBackend):
    """Tells the mode of a replay."""

    def __init__(self) -> None:
        self.launches = Launches()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        repeat, launches = super().capture(work), self.launches

        def replay() -> None:
            launches.counts["replay"] += 1
            launches.is_replaying = True
            repeat()
            launches.is_replaying = False

        return replay


def launched_by(engine: LLM, launches: Launches, wish: dict[str, Any]) -> Counter[str]:
    """By a step of `NUM_SEQS` sequences which all decode and whose tables do not grow."""
    executor = engine.engine.core.executor
    assert isinstance(executor, Worker)
    for i, prompt in enumerate(PROMPTS[:NUM_SEQS]):
        engine.engine.add_request(str(i), prompt, params("greedy", **wish))
    launch, found = executor.launch, []

    def counting(batch: ScheduledBatch) -> LaunchedStep:
        if batch.new or any(s.new_block_ids for s in batch.sequences) or found:
            return launch(batch)
        assert len(batch.sequences) == NUM_SEQS
        launches.counts.clear()
        with launches:
            launched = launch(batch)
        found.append(launches.counts.copy())
        return launched

    executor.launch = counting  # type: ignore[method-assign]
    while not found:
        engine.engine.step()
    executor.launch = launch  # type: ignore[method-assign]
    for i in range(NUM_SEQS):
        engine.engine.abort(str(i))
    return found[0]


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("launches")
    target = engines.write_target("llama", folder / "target", byte_level_tokenizer)
    return target, engines.write_draft("mha", folder / "draft", len(byte_level_tokenizer))


WISHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 1},
    "filtered": {"temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 9},
}


def test_a_step_is_three_graphs_and_two_copies(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers, the choice, the drafts; inputs are sent, and results packed to be read."""
    target, draft = folders
    options: dict[str, Any] = {
        "method": "eagle3",
        "draft_model": str(draft),
        "num_speculative_tokens": 3,
        "block_size": 16,
    }
    backend = WatchedBackend()
    eager = create_engine(target, enforce_eager=True)
    with monkeypatch.context() as patch:
        patch.setattr(planned_graphs, "capture_backend", lambda _: backend)
        plain = create_engine(target, block_size=16)
        drafting = create_engine(target, **options)
    for name, wish in WISHES.items():
        sampling = params("greedy", max_tokens=12, **wish)
        expected = generate(eager, sampling, PROMPTS[:5])
        assert generate(drafting, sampling, PROMPTS[:5]) == expected, name
        moved = {"copy_": 1, "cat": 1}
        assert launched_by(plain, backend.launches, wish) == {"replay": 2, **moved}, name
        assert launched_by(drafting, backend.launches, wish) == {"replay": 3, **moved}, name


def test_where_the_host_has_a_say_the_layers_and_the_drafts_are_graphs(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = folders
    options = {"method": "eagle3", "draft_model": str(draft), "num_speculative_tokens": 3}
    backend = WatchedBackend()
    with monkeypatch.context() as patch:
        patch.setattr(planned_graphs, "capture_backend", lambda _: backend)
        engine = create_engine(target, block_size=16, **options)
    launched = launched_by(engine, backend.launches, {"logprobs": 2})
    assert launched["replay"] == 2
    assert launched["cat"] >= 1


def test_memory_is_measured_of_the_dearest_choice(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the most rows, with filters: on several ranks greedy rows need no gathered logits."""
    monkeypatch.setattr(planned_graphs, "capture_backend", lambda _: ReexecuteBackend())
    engine = create_engine(folders[0], cudagraph_capture_sizes=[2, 4])
    executor = engine.engine.core.executor
    assert isinstance(executor, Worker)
    graphs, keys = executor._runner.steps, []
    assert isinstance(graphs, step_graphs.StepGraphs)
    monkeypatch.setattr(graphs, "_choosing", lambda key: lambda: keys.append(key))
    graphs._rehearse()
    assert [(key.batch_size, key.query_len, key.variant) for key in keys] == [(4, 1, KINDS[-1])]


def test_acceptance_at_random_in_graphs(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same drafts are accepted as without graphs."""
    target, draft = folders
    options: dict[str, Any] = {
        "method": "eagle3",
        "draft_model": str(draft),
        "num_speculative_tokens": 3,
        "speculative_synthetic_acceptance_length": 2.5,
    }
    texts, counts = [], []
    for graphs in (False, True):
        backend = WatchedBackend()
        with monkeypatch.context() as patch:
            if graphs:
                patch.setattr(planned_graphs, "capture_backend", lambda _, own=backend: own)
            engine = create_engine(target, **options)
        texts.append(generate(engine, params("greedy", max_tokens=16, seed=1), PROMPTS[:3]))
        counts.append(engine.engine.core.stats.num_steps)
        assert (backend.launches.counts["replay"] > 0) == graphs
    assert texts[0] == texts[1]
    assert counts[0] == counts[1]


def test_sizes_that_are_all_beyond_a_choice(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers are captured, and tokens chosen op by op."""
    backend = WatchedBackend()
    expected = generate(create_engine(folders[0], enforce_eager=True), params("warm"))
    with monkeypatch.context() as patch:
        patch.setattr(planned_graphs, "capture_backend", lambda _: backend)
        patch.setattr(step_graphs, "MOST_ROWS", 8)
        engine = create_engine(folders[0], block_size=16, cudagraph_capture_sizes=[16])
    executor = engine.engine.core.executor
    assert isinstance(executor, Worker)
    assert isinstance(executor._runner.steps, step_graphs.StepGraphs)
    executor._runner.steps._rehearse()
    assert launched_by(engine, backend.launches, {"temperature": 0.7, "seed": 1})["replay"] == 1
    assert generate(engine, params("warm")) == expected


@pytest.mark.parametrize("method", ["none", "eagle3"])
def test_op_by_op_tokens_are_chosen_as_in_graphs(
    method: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of three ways, whichever filters requests have, so that there is no other kernel."""
    target, draft = folders
    options: dict[str, Any] = {}
    if method != "none":
        options = {"method": method, "draft_model": str(draft), "num_speculative_tokens": 2}
    seen: set[Needs] = set()
    metadata = SamplingRows.metadata

    def noted(rows: Any, ids: Any, positions: Any, needs: Needs, *how: Any) -> Any:
        seen.add(needs)
        return metadata(rows, ids, positions, needs, *how)

    engine = create_engine(target, enforce_eager=True, **options)
    monkeypatch.setattr(SamplingRows, "metadata", noted)
    for wish in ({}, {"temperature": 1.0}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1},
                 {"min_p": 0.1, "logprobs": 1}):  # fmt: skip
        warm = {"temperature": 0.8, "seed": 1} if wish else {}
        generate(engine, params("greedy", max_tokens=4, **{**warm, **wish}), PROMPTS[:2])
    assert seen - {Needs(0)} == set(KINDS[1:])
