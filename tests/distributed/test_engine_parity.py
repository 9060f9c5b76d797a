"""Engines of several ranks generate what an engine of one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from ranks import engines_of_threads
from spec_decode.engines import (
    PROMPTS,
    create_engine,
    drafts_recorded,
    generate,
    params,
    write_draft,
    write_target,
)
from transformers import PreTrainedTokenizerFast

from atom.kv_cache.base import KVCachePlan
from atom.model_engine import rank
from atom.model_engine.start_up import kv_memory

Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Folders:
    folder = tmp_path_factory.mktemp("parity")
    vocab_size = len(byte_level_tokenizer)
    assert vocab_size % 4
    return {
        kind: write_target(kind, folder / kind, byte_level_tokenizer)
        for kind in ("llama", "deepseek_v3")
    } | {kind: write_draft(kind, folder / kind, vocab_size) for kind in ("mha", "mla", "peagle")}


# Target, ranks, options.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "four ranks": ("llama", 4, {}),
    "experts": ("deepseek_v3", 4, {}),
    "eagle3 mha": ("llama", 2, {"method": "eagle3", "draft_model": "mha"}),
    "eagle3 mla": ("deepseek_v3", 4, {"method": "eagle3", "draft_model": "mla"}),
    "whole eagle3": (
        "llama",
        4,
        {"method": "eagle3", "draft_model": "mha", "draft_tensor_parallel_size": 1},
    ),
    "peagle": ("llama", 2, {"method": "eagle3", "draft_model": "peagle"}),
    "mtp": ("deepseek_v3", 2, {"method": "mtp"}),
    "whole mtp": ("deepseek_v3", 2, {"method": "mtp", "draft_tensor_parallel_size": 1}),
    "suffix": ("llama", 2, {"method": "suffix"}),
    "eagle3 and lookup": (
        "llama",
        2,
        {"method": "eagle3", "draft_model": "mla", "speculative_lookup": True},
    ),
    "fixed order": ("llama", 4, {"deterministic_collectives": True}),
    "chunks": (
        "llama",
        2,
        {"max_num_batched_tokens": 12, "max_num_seqs": 8, "method": "suffix"},
    ),
    "preemption": ("llama", 2, {"max_model_len": 64}),
}
SHARED_PREFIX = [[*PROMPTS[5][:16], token] for token in (3, 4, 5)]
CHOSEN = [*PROMPTS[1:4], PROMPTS[9], *PROMPTS[-3:], *SHARED_PREFIX]
SAMPLINGS = [params("greedy", max_tokens=16), params("warm", max_tokens=16)]


@pytest.fixture(scope="module")
def expected(folders: Folders) -> dict[str, list[list[list[int]]]]:
    """Without speculation: it changes no token."""
    found = {}
    for kind in ("llama", "deepseek_v3"):
        with create_engine(folders[kind]) as engine:
            found[kind] = [generate(engine, sampling, CHOSEN) for sampling in SAMPLINGS]
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_same_tokens(
    name: str,
    folders: Folders,
    expected: dict[str, list[list[list[int]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy and sampled."""
    target, size, options = CASES[name]
    options = dict(options)
    if name == "preemption":
        # Room for two sequences at a time.
        monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(24, 0))
    if "method" in options:
        options["num_speculative_tokens"] = 3
    if "draft_model" in options:
        options["draft_model"] = str(folders[options["draft_model"]])
    with (
        patch.object(rank, "in_order", wraps=rank.in_order) as in_order,
        engines_of_threads(),
        create_engine(folders[target], tensor_parallel_size=size, **options) as engine,
    ):
        assert [generate(engine, sampling, CHOSEN) for sampling in SAMPLINGS] == expected[target]
        assert in_order.call_count == (size if name == "fixed order" else 0)
        stats = engine.engine.core.stats
        assert (stats.num_preemptions > 0) == (name == "preemption")
        assert stats.prefix_cache_hits > 0


@pytest.mark.parametrize("name", ["eagle3 mha", "peagle", "whole mtp"])
def test_the_same_drafts(name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank knows how a request samples, and chooses its drafts accordingly."""
    target, size, options = CASES[name]
    options = {**options, "num_speculative_tokens": 3, "enable_prefix_caching": False}
    if "draft_model" in options:
        options["draft_model"] = str(folders[options["draft_model"]])
    with drafts_recorded(monkeypatch) as recorded, engines_of_threads():
        for ranks in (1, size):
            with create_engine(folders[target], tensor_parallel_size=ranks, **options) as engine:
                generate(engine, params("warm", max_tokens=16), CHOSEN[:4])
    alone, *together = recorded
    assert alone in together
    assert len(alone) > 30
