"""Hundreds of requests of every kind, and not one block is left behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from models.checkpoints import prompt
from spec_decode import engines
from transformers import PreTrainedTokenizerFast

from atom import SamplingParams
from atom.kv_cache.base import KVCachePlan
from atom.model_engine.start_up import kv_memory

NUM_REQUESTS = 500


@pytest.mark.parametrize("method", ["suffix", "eagle3"])
def test_no_block_is_left(
    method: str,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = engines.write_target("llama", tmp_path / "target", byte_level_tokenizer)
    speculation = {"method": method, "num_speculative_tokens": 3}
    if method == "eagle3":
        draft = engines.write_draft("mha", tmp_path / "draft", len(byte_level_tokenizer))
        speculation["draft_model"] = str(draft)
    # Room for a few sequences only.
    monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(60, 0))
    engine = engines.create_engine(folder, max_num_batched_tokens=48, **speculation).engine
    rng = random.Random(0)
    prefixes = [prompt(n, seed=n) for n in (12, 25, 40)]
    unfinished: set[str] = set()
    finished = aborted = submitted = 0
    while submitted < NUM_REQUESTS or engine.has_unfinished:
        for _ in range(rng.randint(0, 4) if submitted < NUM_REQUESTS else 0):
            token_ids = [*rng.choice(prefixes), *prompt(rng.randint(1, 30), seed=submitted)]
            sampling = SamplingParams(
                max_tokens=rng.randint(1, 40),
                temperature=rng.choice([0.0, 1.0]),
                n=rng.choice([1, 1, 1, 2]),
            )
            priority = rng.randint(0, 2)
            engine.add_request(str(submitted), token_ids, sampling, priority=priority)
            unfinished.add(str(submitted))
            submitted += 1
        if unfinished and rng.random() < 0.1:
            victim = rng.choice(sorted(unfinished))
            unfinished.discard(victim)
            engine.abort(victim)
            aborted += 1
        if engine.has_unfinished:
            for output in engine.step().outputs:
                unfinished.discard(output.request_id)
                finished += 1
        engine.core.block_pool.check_integrity()
    stats = engine.core.stats
    assert stats.num_used_blocks == 0
    assert finished + aborted == submitted
    assert aborted > 20
    assert stats.num_preemptions > 10
    assert stats.prefix_cache_hits > 1000
    assert stats.spec_decode is not None
    assert stats.spec_decode.num_drafts > 100
