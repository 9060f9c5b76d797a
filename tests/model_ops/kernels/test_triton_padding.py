"""Queries that only pad a graph: their slots, which nobody wrote, may hold another's NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch
from gluon_interpreter import interpreted
from test_triton_attention import metadata_of, random_cache

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.gluon import paged_attention as gluon
from atom.model_ops.kernels.torch import attention as torch_heads
from atom.model_ops.kernels.torch import mla as torch_mla
from atom.model_ops.kernels.triton.attention import invariant_attention
from atom.model_ops.kernels.triton.attention.paged_attention import attend
from atom.model_ops.kernels.triton.mla import invariant_mla
from atom.model_ops.kernels.triton.mla import mla_decode as decode_module
from atom.model_ops.kernels.triton.mla.mla_decode import mla_decode
from atom.platform import current_platform

QUERIES, BLOCK_SIZE, NUM_BLOCKS = 4, 16, 32
# Contexts with their padding, and how much of that there is. One begins a block, one a tile of keys
# and one a split.
CONTEXTS = {40: 2, 12: 0, 67: 3, 19: 3, 131: 3}
ONE_UNIT, MANY_UNITS = 1, 64
Attend = Callable[..., torch.Tensor]


def padded(device: torch.device) -> tuple[AttentionMetadata, torch.Tensor, torch.Tensor]:
    """The batch, its unwritten slots, and which rows are no padding."""
    sequences = [(context, QUERIES) for context in CONTEXTS]
    metadata = metadata_of(sequences, BLOCK_SIZE, NUM_BLOCKS, device)
    padding = torch.tensor(list(CONTEXTS.values()), dtype=torch.int32, device=device)
    real = torch.arange(QUERIES, device=device) < QUERIES - padding[:, None]
    metadata = dataclasses.replace(metadata, padding_lens=padding)
    return metadata, metadata.slot_mapping[~real.flatten()], real.flatten()


def check(run: Attend, pools: tuple[torch.Tensor, ...], device: torch.device) -> None:
    """Rows that are no padding are as if the others had written something; none is NaN."""
    metadata, unwritten, real = padded(device)
    wanted = run(dataclasses.replace(metadata, padding_lens=None))
    for pool in pools:
        pool.view(-1, *pool.shape[2:])[unwritten] = float("nan")
    out = run(metadata)
    torch.testing.assert_close(out[real], wanted[real], atol=2e-2, rtol=2e-2)
    assert out.isfinite().all()


def gluon_attention(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Attend:
    if device.type == "cpu":
        monkeypatch.setattr(gluon, "_attend", interpreted(gluon._attend))
        return partial(gluon.attend, 3, ONE_UNIT)
    if current_platform().arch not in gluon._GENERATION:
        pytest.skip("for gfx942 and gfx950; where there is no GPU its arithmetic is tested")
    return partial(gluon.attend, gluon._GENERATION[current_platform().arch], ONE_UNIT)


@pytest.mark.parametrize("name", ["torch", "one split", "splits", "fixed splits", "gluon"])
@pytest.mark.parametrize("window", [None, 30])
def test_heads(
    name: str, window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "atom.model_ops.kernels.triton.attention.paged_attention._SHORTEST_SPLIT", 16
    )
    monkeypatch.setattr("atom.model_ops.kernels.triton.attention.fixed_splits.SPLIT_KEYS", 64)
    ops: dict[str, Callable[[], Attend]] = {
        "torch": lambda: torch_heads.paged_attention,
        "one split": lambda: partial(attend, ONE_UNIT),
        "splits": lambda: partial(attend, MANY_UNITS),
        "fixed splits": lambda: invariant_attention.paged_attention,
        "gluon": lambda: gluon_attention(device, monkeypatch),
    }
    op = ops[name]()
    cache = random_cache((NUM_BLOCKS, BLOCK_SIZE, 2, 64), torch.bfloat16, device)
    q = torch.randn(len(CONTEXTS) * QUERIES, 2, 64, generator=torch.Generator().manual_seed(2))
    q = q.to(device, torch.bfloat16)
    check(lambda m: op(q, cache, m, 0.125, window), (cache.key, cache.value), device)


@pytest.mark.parametrize("name", ["torch", "one split", "splits", "fixed splits"])
def test_latents(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "num_splits", lambda *_: 4 if name == "splits" else 1)
    monkeypatch.setattr(decode_module, "_LEAST_KEYS", 16)
    monkeypatch.setattr("atom.model_ops.kernels.triton.attention.fixed_splits.SPLIT_KEYS", 64)
    ops: dict[str, Attend] = {
        "torch": torch_mla.mla_attention,
        "fixed splits": partial(
            invariant_mla.attend, "rocm" if device.type == "cpu" else current_platform().kind
        ),
    }
    op = ops.get(name, mla_decode)
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(NUM_BLOCKS, BLOCK_SIZE, 32 + 8, generator=generator).to(device)
    q = torch.randn(len(CONTEXTS) * QUERIES, 3, 8 + 8, generator=generator).to(device)
    up_proj = torch.randn(3, 8 + 12, 32, generator=generator).to(device) / 6
    cache = LatentCacheTensor(pool)
    check(lambda m: op(q, cache, up_proj, m, 0.2), (pool,), device)
