"""Engines of several ranks generate what an engine of one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import checkpoints
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
    } | {kind: write_draft(kind, folder / kind, vocab_size) for kind in ("mha", "mla")}


# Target, ranks, options.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "plain": ("llama", 4, {}),
    "experts": ("deepseek_v3", 4, {}),
    "eagle3 mha": ("llama", 2, {"method": "eagle3", "speculative_model": "mha"}),
    "eagle3 mla": ("llama", 4, {"method": "eagle3", "speculative_model": "mla"}),
    "whole draft": (
        "llama",
        4,
        {"method": "eagle3", "speculative_model": "mha", "draft_tensor_parallel_size": 1},
    ),
    "mtp": ("deepseek_v3", 2, {"method": "mtp"}),
    "whole mtp": ("deepseek_v3", 4, {"method": "mtp", "draft_tensor_parallel_size": 1}),
    "ngram": ("llama", 2, {"method": "ngram"}),
    "eagle3 and lookup": (
        "llama",
        2,
        {"method": "eagle3", "speculative_model": "mha", "speculative_lookup": True},
    ),
    "fixed order": ("llama", 4, {"deterministic_collectives": True}),
    # Prompts of up to 39 tokens in chunks of 12, prefixes from the cache.
    "chunks": ("llama", 2, {"max_num_batched_tokens": 12, "enable_prefix_caching": True}),
    # 24 blocks for sequences of up to 16 blocks.
    "preemption": ("deepseek_v3", 2, {"kv_cache_memory": "24 blocks", "method": "mtp"}),
}
