"""Queries projected into the latent space, against the products and the ops that it stands for."""

from __future__ import annotations

import pytest
import torch

from atom.model_ops.attention.metadata import LatentCacheTensor
from atom.model_ops.kernels.torch import elementwise, mla
from atom.model_ops.kernels.triton.mla.mla_absorb import NewLatents, absorb

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def projected(q: torch.Tensor, up_proj: torch.Tensor, num_heads: int) -> torch.Tensor:
    """In float64: [T, num_heads, rank + rope]."""
    heads, _, rank = up_proj.shape
    nope = up_proj.shape[1] - 12
    carried = torch.einsum("thn,hnr->thr", q[..., :nope].double(), up_proj[:, :nope].double())
    out = torch.zeros(len(q), num_heads, rank + q.shape[2] - nope, dtype=torch.float64)
    out[:, :heads] = torch.cat((carried, q[..., nope:].double()), dim=-1).cpu()
    return out


@pytest.mark.parametrize(
    ("tokens", "heads", "num_heads", "nope", "rope", "rank", "dtype"),
    [
        (3, 2, 16, 8, 8, 32, torch.float32),
        (1, 3, 3, 24, 4, 48, torch.float32),
        (70, 1, 2, 16, 8, 160, torch.float32),
        (5, 2, 4, 128, 64, 512, torch.bfloat16),
        (0, 2, 4, 8, 8, 32, torch.float32),
    ],
)
def test_queries_are_projected(
    tokens: int,
    heads: int,
    num_heads: int,
    nope: int,
    rope: int,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Heads that are not there are zeros, whatever lay in memory."""
    # As a slice of wider rows.
    q = random(tokens, heads, nope + rope + 4, dtype=dtype, device=device)[..., : nope + rope]
    up_proj = random(heads, nope + 12, rank, dtype=dtype, device=device, seed=1) * nope**-0.5
    cache = LatentCacheTensor(torch.empty(2, 4, rank + rope, dtype=dtype, device=device))
    got = absorb(q, up_proj, cache, num_heads)
    wanted = projected(q, up_proj, num_heads)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double().cpu(), wanted, rtol=tolerance, atol=tolerance)
    assert not got[:, heads:].count_nonzero()


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("storage", [torch.float32, torch.float8_e4m3fn])
def test_what_comes_before_is_what_the_op_does(
    tokens: int, interleaved: bool, storage: torch.dtype, device: torch.device
) -> None:
    """Rotation and cache write, slot -1 and positions outside the table included."""
    heads, nope, rope, rank, rows = 2, 8, 8, 160, 64
    q = random(tokens, heads, nope + rope, dtype=torch.float32, device=device)
    up_proj = random(heads, nope + 12, rank, dtype=torch.float32, device=device, seed=1)
    fused = random(tokens, rank + rope, dtype=torch.float32, device=device, seed=2)
    latent, k_rope = fused[:, :rank], fused[:, rank:]
    positions = torch.arange(tokens, device=device) * 3
    positions[1] = rows
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(3))[:tokens].to(device)
    slots[0] = -1
    angles = torch.rand(rows, rope // 2, generator=torch.Generator().manual_seed(4)) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    positions.clamp_(max=rows)
    scale = None if storage is torch.float32 else torch.tensor([0.02], device=device)
    # The torch op writes slot -1 to a spare block on a GPU.
    pools = [torch.zeros(5, rows // 4, rank + rope, device=device).to(storage) for _ in range(2)]
    ours, theirs = (LatentCacheTensor(pool, scale) for pool in pools)
    got = absorb(
        q, up_proj, ours, 4, NewLatents(positions, slots, latent, k_rope, table, interleaved)
    )
    known = positions.clamp(max=rows - 1)
    rotated = mla.mla_rope_and_cache(
        known, q, latent, k_rope, table, interleaved, theirs, slots,
        elementwise.rope, mla.mla_cache_write,
    )  # fmt: skip
    inside = positions < rows
    torch.testing.assert_close(
        got[inside].double().cpu(),
        projected(rotated, up_proj, 4)[inside.cpu()],
        rtol=1e-5,
        atol=1e-5,
    )
    assert got[~inside][:, :heads, rank:].isnan().all()
    written, spare = pools[0].float().flatten(0, 1).split((rows, rows // 4))
    wanted = pools[1].float().flatten(0, 1)[:rows]
    assert not spare.any()
    outside = slots[~inside]
    assert written[outside][:, rank:].isnan().all()
    written[outside, rank:] = wanted[outside, rank:]
    torch.testing.assert_close(
        written, wanted, rtol=2**-3 if scale is not None else 1e-5, atol=1e-5
    )
