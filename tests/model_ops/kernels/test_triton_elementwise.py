"""Norms, rotation and gated activation through Triton against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from atom.model_ops.kernels.torch import elementwise
from atom.model_ops.kernels.triton.activation import silu_and_mul
from atom.model_ops.kernels.triton.rms_norm import (
    add_rms_norm,
    refuses,
    refuses_pair,
    rms_norm,
    rms_norm_beside,
    rms_norm_pair,
)
from atom.model_ops.kernels.triton.rope import rope
from atom.model_ops.registry import OpQuery
from atom.platform import Platform

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place of the result, and the errors of float32 sums.
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
ATOL = {torch.float32: 2e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def assert_near(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert got.shape == exact.shape
    torch.testing.assert_close(got.double(), exact, rtol=1.01 * RTOL[dtype], atol=ATOL[dtype])


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same numbers [2, 2, size] in the layouts in which layers have them."""
    wide = torch.cat((x, x + 1), dim=-1)
    heads = torch.cat((x, x + 1), dim=1)
    return {
        "one row": x[0, 0],
        "part of a row": wide.flatten(0, 1)[:, : x.shape[-1]],
        "heads of a wider projection": heads[:, :2],
        "parts of heads": wide[..., : x.shape[-1]],
        "turned": x.transpose(-1, -2).contiguous().transpose(-1, -2),
        "four dimensions": x.view(2, 1, *x.shape[1:]),
        "nothing": x[:0],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 128, 576])
def test_norms(dtype: torch.dtype, size: int, device: torch.device) -> None:
    """The residual's sum is rounded before it is normalised."""
    weight = random(size, dtype=dtype, device=device)
    x = random(3, size, dtype=dtype, device=device, seed=1)
    residual = random(3, size, dtype=dtype, device=device, seed=2) * 3
    assert_near(rms_norm(x, weight, 1e-5), exact_norm(x, weight, 1e-5), dtype)
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_near(out, exact_norm(total, weight, 1e-5), dtype)


def test_norms_of_every_layout(device: torch.device) -> None:
    weight = random(30, dtype=torch.bfloat16, device=device)
    each = layouts(random(2, 2, 30, dtype=torch.bfloat16, device=device, seed=1))
    others = layouts(random(2, 2, 30, dtype=torch.bfloat16, device=device, seed=2))
    for name, x in each.items():
        assert_near(rms_norm(x, weight, 1e-5), exact_norm(x, weight, 1e-5), x.dtype)
        for residual in (others[name], others[name].contiguous()):
            out, total = add_rms_norm(x, residual, weight, 1e-5)
            assert torch.equal(total, x + residual)
            assert_near(out, exact_norm(total, weight, 1e-5), x.dtype)


def test_a_row_of_zeros_and_a_large_row(device: torch.device) -> None:
    x = torch.zeros(2, 7168, device=device)
    x[1] = 1e15
    weight = torch.ones(7168, device=device)
    assert rms_norm(x, weight, 1e-6)[:, 0].tolist() == pytest.approx([0, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(30, 16), (5, 576)])
def test_norms_of_two_parts_of_a_row(
    dtype: torch.dtype, sizes: tuple[int, int], device: torch.device
) -> None:
    x = random(3, sum(sizes) + 7, dtype=dtype, device=device)
    weights = [random(n, dtype=dtype, device=device, seed=n) for n in sizes]
    parts = x[:, : sizes[0]], x[:, sizes[0] : sum(sizes)]
    for given in (x, x.T.contiguous().T):
        out = rms_norm_pair(given, *weights, 1e-6, rms_norm)
        for got, part, weight in zip(out, parts, weights, strict=True):
            assert_near(got, exact_norm(part, weight, 1e-6), dtype)
    assert [len(part) for part in rms_norm_pair(x[:0], *weights, 1e-6, rms_norm)] == [0, 0]
    with pytest.raises(ValueError, match="no parts"):
        rms_norm_pair(x[:, : sum(sizes) - 1], *weights, 1e-6, rms_norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 100, 4096])
def test_norms_side_by_side(dtype: torch.dtype, size: int, device: torch.device) -> None:
    """They are those that `rms_norm` computes."""
    x, y = (random(3, size + 5, dtype=dtype, device=device, seed=s)[:, :size] for s in (0, 1))
    weights = [random(size, dtype=dtype, device=device, seed=s) for s in (2, 3)]
    both, other = rms_norm_beside(x, y, *weights, 1e-6, rms_norm)
    assert other.equal(rms_norm(y, weights[1], 1e-6))
    assert both.equal(torch.cat((rms_norm(x, weights[0], 1e-6), other), dim=-1))
    turned = (t.T.contiguous().T for t in (x, y))
    assert rms_norm_beside(*turned, *weights, 1e-6, rms_norm)[0].equal(both)
    empty, _ = rms_norm_beside(x[:0], y[:0], *weights, 1e-6, rms_norm)
    assert empty.shape == (0, 2 * size)
    with pytest.raises(ValueError, match="norms side by side want"):
        rms_norm_beside(x, y[:2], *weights, 1e-6, rms_norm)


def test_two_norms_refuse_where_another_kernel_is_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    query = OpQuery(Platform("rocm", "gfx942", True), torch.bfloat16, {"size": 1536})
    assert refuses_pair(query) is None
    monkeypatch.setenv("ATOM_OP_RMS_NORM", "torch")
    assert refuses_pair(query) == "does the work of rms_norm, and ATOM_OP_RMS_NORM=torch"


def test_norms_refuse_what_does_not_fit(device: torch.device) -> None:
    x = torch.zeros(2, 8, device=device)
    for weight, residual in ((x[0, :7], x), (x[0], x[:1])):
        with pytest.raises(ValueError, match="a norm wants"):
            add_rms_norm(x, residual, weight, 1e-5)
    sm90 = Platform("cuda", "sm90", True)
    assert refuses(OpQuery(sm90, torch.bfloat16, {"size": 16384})) is None
    assert refuses(OpQuery(sm90, torch.bfloat16, {"size": 16385})) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 40, 1536])
def test_silu_and_mul(dtype: torch.dtype, size: int, device: torch.device) -> None:
    wide = random(3, 2 * size + 3, dtype=dtype, device=device) * 4
    turned = wide[:, : 2 * size].T.contiguous().T
    for x in (wide[:, : 2 * size].contiguous(), wide[:, : 2 * size], turned, wide[:0, : 2 * size]):
        gate, up = x.double().chunk(2, dim=-1)
        assert_near(silu_and_mul(x), F.silu(gate) * up, dtype)


def test_silu_of_extreme_gates(device: torch.device) -> None:
    gates = torch.tensor([-1e4, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4, float("nan")])
    got = silu_and_mul(torch.cat((gates, torch.ones_like(gates)))[None].to(device))[0].cpu()
    torch.testing.assert_close(got, F.silu(gates), rtol=1e-5, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim", "dtype"),
    [
        (9, 3, 64, 64, torch.bfloat16),
        (2, 1, 80, 80, torch.float32),
        (3, 2, 96, 40, torch.float16),
        (16, 1, 64, 64, torch.float32),
        (1, 4, 2, 2, torch.bfloat16),
    ],
)
def test_rope(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    interleaved: bool,
    device: torch.device,
) -> None:
    table = random(50, rotary_dim, dtype=torch.float32, device=device, seed=3)
    positions = torch.tensor([0, 49], device=device)
    fused = random(2, heads + kv_heads, head_dim + 6, dtype=dtype, device=device)
    q, k = fused[:, :heads, :head_dim], fused[:, heads:, 6:]
    exact = elementwise.rope(positions, q.double(), k.double(), table.double(), interleaved)
    for given in ((q, k), (q.contiguous(), k.mT.contiguous().mT)):
        for got, wanted in zip(rope(positions, *given, table, interleaved), exact, strict=True):
            assert_near(got, wanted, dtype)
    assert rope(positions[:0], q[:0], k[:0], table, interleaved)[0].shape == (0, heads, head_dim)


def test_rope_outside_the_table_is_not_a_number(device: torch.device) -> None:
    q = torch.ones(4, 1, 6, device=device)
    positions = torch.tensor([-1, 3, 2, 2**40], device=device)
    got, _ = rope(positions, q, q, torch.ones(3, 4, device=device), False)
    assert got[:, 0, :4].isnan().all(-1).tolist() == [True, True, False, True]
    assert (got[..., 4:] == 1).all()
    with pytest.raises(ValueError, match="rope wants"):
        rope(positions, q, q[:3], torch.ones(3, 4, device=device), False)
