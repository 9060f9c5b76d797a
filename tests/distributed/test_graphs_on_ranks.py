"""Ranks that replay graphs generate what one rank does, whose steps run op by op."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ranks import engines_of_threads
from spec_decode.engines import (
    PROMPTS,
    create_engine,
    generate,
    params,
    write_draft,
    write_target,
)
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.graphs.capture import GraphKey, ReexecuteBackend
from atom.messages import EngineStats
from atom.model_engine.step import planned_graphs
from atom.sampling.plan import KINDS
from atom.sampling_params import Needs

Folders = dict[str, Path]
# Longer than any query of a graph, so that none replays a prompt.
CHOSEN = PROMPTS[1:4]
EAGLE3 = {"method": "eagle3", "draft_model": "mha", "num_speculative_tokens": 3}
# Target, ranks, options.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "no drafts": ("llama", 4, {}),
    "eagle3": ("llama", 2, EAGLE3),
    "eagle3 ahead": ("llama", 2, {**EAGLE3, "overlap": True}),
    "mtp": ("deepseek_v3", 2, {"method": "mtp", "num_speculative_tokens": 3}),
}
GREEDY, WARM, TOP_K, TOP_P, MIN_P = (
    params("greedy", max_tokens=12),
    params("warm", max_tokens=12),
    params("warm", max_tokens=12, top_k=9),
    params("top-p", max_tokens=12),
    params("top-k min-p", max_tokens=12),
)
EDITED = params("warm", max_tokens=12, presence_penalty=0.8)
# Of the three prompts, and how graphs may choose their tokens. As they end, fewer kinds are left.
SAMPLINGS: list[tuple[list[SamplingParams], set[Needs]]] = [
    ([GREEDY] * 3, {KINDS[0]}),
    ([WARM] * 3, {KINDS[1]}),
    ([TOP_K] * 3, {KINDS[2]}),
    ([TOP_P] * 3, {KINDS[2]}),
    ([MIN_P] * 3, {KINDS[2]}),
    ([GREEDY, WARM, TOP_P], set(KINDS)),
    ([EDITED] * 3, set()),
    ([EDITED, GREEDY, TOP_P], set(KINDS)),
]


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Folders:
    folder = tmp_path_factory.mktemp("graphs on ranks")
    kinds = ("llama", "deepseek_v3")
    targets = {kind: write_target(kind, folder / kind, byte_level_tokenizer) for kind in kinds}
    return {**targets, "mha": write_draft("mha", folder / "mha", len(byte_level_tokenizer))}


class CountingBackend(ReexecuteBackend):
    """Counts the replays of each rank, which is a thread, by the key of what was captured."""

    def __init__(self) -> None:
        self.counts: dict[int, Counter[GraphKey]] = {}

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        assert isinstance(work, partial)
        key, repeat = work.args[0], super().capture(work)

        def replay() -> None:
            self.counts.setdefault(threading.get_ident(), Counter())[key] += 1
            repeat()

        return replay

    def take(self, num_ranks: int) -> Counter[GraphKey]:
        """The replays of every rank since the last call, which are the same."""
        counts, self.counts = list(self.counts.values()), {}
        assert len(counts) == num_ranks
        assert all(own == counts[0] for own in counts)
        return counts[0]


def graphed_engine(
    name: str, folders: Folders, backend: CountingBackend, patch: pytest.MonkeyPatch
) -> LLM:
    target, size, options = CASES[name]
    options = {**options, "enable_prefix_caching": False, "tensor_parallel_size": size}
    if "draft_model" in options:
        options["draft_model"] = str(folders[options["draft_model"]])
    with patch.context() as context, engines_of_threads():
        context.setattr(planned_graphs, "capture_backend", lambda _: backend)
        engine = create_engine(folders[target], cudagraph_capture_sizes="1,4", **options)
    backend.counts.clear()
    return engine


def since(before: EngineStats, after: EngineStats) -> EngineStats:
    """What was counted between them."""
    names = [name for name in before.__struct_fields__ if name.endswith("_steps")]
    return msgspec.structs.replace(
        after, **{name: getattr(after, name) - getattr(before, name) for name in names}
    )


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_replays(name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step that decodes replays its layers, its drafts, and the choice of its tokens in the
    way that its requests sample, unless the first rank alone knows what edits their logits.
    """
    target, size, options = CASES[name]
    with create_engine(folders[target]) as alone:
        expected = [generate(alone, wanted, CHOSEN) for wanted, _ in SAMPLINGS]
    backend = CountingBackend()
    with graphed_engine(name, folders, backend, monkeypatch) as engine:
        for (wanted, kinds), tokens in zip(SAMPLINGS, expected, strict=True):
            before = engine.engine.core.stats
            assert generate(engine, wanted, CHOSEN) == tokens
            stats, replays = since(before, engine.engine.core.stats), backend.take(size)
            of = Counter(key.stage for key in replays.elements())
            assert of["target"] == stats.num_replayed_decode_steps == stats.num_decode_steps >= 3
            assert of["draft"] == stats.num_draft_steps == (of["target"] if options else 0)
            assert of["choose"] == stats.num_replayed_choice_steps
            assert (of["choose"] == of["target"]) == (EDITED not in wanted)
            assert {key.variant for key in replays if key.stage == "choose"} <= kinds
