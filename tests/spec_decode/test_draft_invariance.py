"""A draft depends on the text before it, not on the way in which that text was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import prompt
from spec_decode import engines
from spec_decode.engines import create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom.kv_cache.base import KVCachePlan
from atom.model_engine import worker

MAX_TOKENS = 16
SHARED = prompt(21, seed=5)
# Prefixes that end inside a block, on its edge, and with another token after the same block.
PROMPTS = [[*SHARED[:n], *prompt(9, seed=n)] for n in (8, 16, 16, 17, 20)] + [SHARED, SHARED[:12]]
PROMPTS[2] = [*SHARED[:16], 40, *prompt(8, seed=99)]

WAYS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 16},
    "tiny chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 2},
    "prefix hits": {"enable_prefix_caching": True},
    "prefix hits in chunks": {"enable_prefix_caching": True, "max_num_batched_tokens": 16},
    "preempted": {},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("target", "draft"), [("llama", "mha"), ("deepseek_v3", "mla"), ("deepseek_v3", None)]
)
def test_drafts_are_the_same(
    target: str,
    draft: str | None,
    way: str,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = engines.write_target(target, tmp_path / "target", byte_level_tokenizer)
    speculation = {"method": "mtp", "num_speculative_tokens": 4}
    if draft is not None:
        written = engines.write_draft(draft, tmp_path / "draft", len(byte_level_tokenizer))
        speculation |= {"method": "eagle3", "draft_model": str(written)}
    with engines.drafts_recorded(monkeypatch) as recorders:
        whole = create_engine(folder, enable_prefix_caching=False, **speculation)
        changes = {"enable_prefix_caching": False, **WAYS[way]}
        if way == "preempted":
            # Room for two sequences at a time.
            monkeypatch.setattr(worker, "plan_kv_cache", lambda *_: KVCachePlan(24, 0))
            changes |= {"max_model_len": 64}
        other = create_engine(folder, **speculation, **changes)
    sampling = params("warm", max_tokens=MAX_TOKENS)
    expected = generate(whole, sampling, PROMPTS)
    for _ in range(2):  # the second time every prefix is cached
        assert generate(other, sampling, PROMPTS) == expected
    stats = other.engine.core.stats
    assert (stats.num_preemptions > 0) == (way == "preempted")
    assert (stats.prefix_cache_hits > 0) == way.startswith("prefix")
    compared = recorders[0].keys() & recorders[1].keys()
    assert len(compared) > 50
    for history in compared:
        # Drafts that max_tokens keeps from ever being verified may be made without a KV slot.
        room = max(_num_prompt(history) + MAX_TOKENS - len(history) - 1, 0)
        assert recorders[0][history][:room] == recorders[1][history][:room]


def _num_prompt(history: tuple[int, ...]) -> int:
    return max(len(p) for p in PROMPTS if history[: len(p)] == tuple(p))
