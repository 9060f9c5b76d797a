"""Every layer's keys and values land in the slots of their tokens, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import checkpoints
from models.checkpoints import prompt
from models.harness import ModelBench

TOKENS = prompt(19)


@pytest.mark.parametrize("sizes", [[19], [6], [1]], ids=["whole", "chunked", "decoded"])
class TestSlots:
    @pytest.mark.parametrize("make", [checkpoints.llama, checkpoints.qwen3])
    def test_keys_and_values(self, make, sizes: list[int], tmp_path: Path) -> None:
        checkpoint = make(tmp_path)
        bench = ModelBench(tmp_path)
        bench.run(TOKENS, sizes)
        slots = bench.slots("seq")
        pool = bench.pools["kv_cache"]  # [layers, 2, blocks, block_size, kv_heads, head_dim]
        for layer, (keys, values) in enumerate(checkpoint.kv_cache(TOKENS)):
            for found, expected in zip(pool[layer].flatten(1, 2), (keys, values), strict=True):
                _assert_only(found, slots, expected.transpose(0, 1))

    @pytest.mark.parametrize("make", [checkpoints.deepseek_v2, checkpoints.deepseek_v3])
    def test_latents(self, make, sizes: list[int], tmp_path: Path) -> None:
        checkpoint = make(tmp_path)
        bench = ModelBench(tmp_path)
        bench.run(TOKENS, sizes)
        slots = bench.slots("seq")
        pool = bench.pools["kv_cache"]  # [layers, blocks, block_size, rank + rope]
        for layer, (latent, k_rope) in enumerate(checkpoint.kv_cache(TOKENS)):
            if make is checkpoints.deepseek_v2:
                # Only here transformers leaves rotated pairs side by side.
                k_rope = torch.cat((k_rope[..., 0::2], k_rope[..., 1::2]), dim=-1)
            _assert_only(pool[layer].flatten(0, 1), slots, torch.cat((latent, k_rope), -1)[0])


def _assert_only(found: torch.Tensor, slots: list[int], expected: torch.Tensor) -> None:
    torch.testing.assert_close(found[slots], expected, atol=1e-4, rtol=0)
    others = torch.ones(found.shape[0], dtype=torch.bool)
    others[slots] = False
    assert not found[others].any()
