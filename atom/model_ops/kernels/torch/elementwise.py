"""Normalisation, activation and rotary embedding in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.quant.rounding import InputRounding, Rows

_Pair = tuple[torch.Tensor, torch.Tensor]

# Ops that others are given, with what they take by position; a pair norm with its `rms_norm`.
Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], _Pair]
PairNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], _Pair]
CacheWrite = Callable[[torch.Tensor, torch.Tensor, KVCacheTensor, torch.Tensor], None]
Rope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool], _Pair]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., size] or [T, heads, size] with a weight for each head -> the same shape.

    Args:
        bias: of the shape of the weight.
    """
    scaled = F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()
    return (scaled if bias is None else scaled + bias.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def add_rms_norm_quantise(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rounding: InputRounding,
    add_rms_norm: AddNorm,
) -> tuple[Rows, torch.Tensor]:
    """`add_rms_norm`: a product quantises rows that are not.

    Args:
        rounding: how one kernel would quantise them.
        add_rms_norm: that op.
    """
    del rounding
    return add_rms_norm(x, residual, weight, eps)


def rms_norm_pair(
    x: torch.Tensor, weight: torch.Tensor, other_weight: torch.Tensor, eps: float, rms_norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of the first a and the next b columns of x [T, a + b or more]: [T, a], [T, b].

    Args:
        weight, other_weight: [a], [b].
        rms_norm: that op.
    """
    size = weight.shape[0]
    other = x[:, size : size + other_weight.shape[0]]
    return rms_norm(x[:, :size], weight, eps), rms_norm(other, other_weight, eps)


def rms_norm_beside(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    other_weight: torch.Tensor,
    eps: float,
    rms_norm: Norm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of x and y [T, size] side by side, [T, 2 size], and that of y alone.

    Args:
        weight, other_weight: [size], of x and of y.
        rms_norm: that op.
    """
    other = rms_norm(y, other_weight, eps)
    return torch.cat((rms_norm(x, weight, eps), other), dim=-1), other


def rms_norm_pair_quantise(
    x: torch.Tensor,
    weight: torch.Tensor,
    other_weight: torch.Tensor,
    eps: float,
    rounding: InputRounding,
    rms_norm_pair: PairNorm,
) -> tuple[Rows, torch.Tensor]:
    """`rms_norm_pair`: a product quantises rows that are not.

    Args:
        rounding: how one kernel would quantise the first part.
        rms_norm_pair: that op.
    """
    del rounding
    return rms_norm_pair(x, weight, other_weight, eps)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """As `silu_and_mul`, with gelu's approximation by tanh."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def situ_and_mul(x: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """As `silu_and_mul`, with beta tanh(gate / beta) sigmoid(gate) and linear_beta tanh(up /
    linear_beta) in float32 (Kimi-K3).
    """
    gate, up = x.float().chunk(2, dim=-1)
    opened = beta * torch.tanh(gate / beta) * gate.sigmoid()
    return (opened * linear_beta * torch.tanh(up / linear_beta)).to(x.dtype)


def mix_residuals(
    closed: torch.Tensor,
    running: torch.Tensor,
    norm: torch.Tensor,
    proj: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The mixture of closed [n, T, size], n at most 63, and running [T, size] by the softmax of
    their scores, [T, size]: a score is the product of a row's norm with proj. In float32.

    Args:
        norm: [size], its weight.
        proj: [1, size].
    """
    sources = torch.cat((closed, running[None])).float()
    inverse = torch.rsqrt(sources.square().mean(-1) + eps)
    scores = (sources * (norm.float() * proj.float().view(-1))).sum(-1) * inverse
    return (scores.softmax(0)[..., None] * sources).sum(0).to(running.dtype)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y in the memory of x, which is returned."""
    return x.add_(y)


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor in the memory of x, which is returned."""
    return x.mul_(factor)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) in the memory of x, which is returned."""
    return x.div_(cap).tanh_().mul_(cap)


def mul_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [T, size] * sigmoid(gate [T, 1 or size]) in the memory of x, which is returned."""
    return x.mul_(gate.sigmoid())


def scale_by_position(
    x: torch.Tensor, positions: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """x [T, heads, d] * factors[positions] in the memory of x, which is returned.

    Args:
        positions: [T] int64.
        factors: [P] float32, of each position.
    """
    return x.copy_(x * factors[positions][:, None, None])


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """`1 / (1 + exp(-x))` of x [N] float32."""
    return x.sigmoid()


def rope(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [T, heads, d] and k [T, kv_heads, d] in float32.

    Args:
        positions: [T] int64.
        cos_sin: [positions, rotary_dim] float32, cosines then sines; dimensions beyond rotary_dim
            are unchanged.
        interleaved: the input has pairs (x0, x1), (x2, x3), ... instead of halves; the output
            always has halves.
    """
    cos, sin = cos_sin[positions][:, None, :].chunk(2, dim=-1)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    rotary_dim = 2 * cos.shape[-1]
    rotated = x[..., :rotary_dim].float()
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rotary_dim < x.shape[-1]:
        parts.append(x[..., rotary_dim:].float())
    return torch.cat(parts, dim=-1).to(x.dtype)


def rope_and_cache(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    kv_cache: KVCacheTensor,
    slot_mapping: torch.Tensor,
    rope: Rope,
    write: CacheWrite,
) -> torch.Tensor:
    """Rotate q [T, heads, d] and k [T, kv_heads, d]; write k and v to their slots -> q.

    Args:
        cos_sin, interleaved: as of `rope`.
        rope, write: the ops `rope` and `kv_cache_write` for this cache.
    """
    q, k = rope(positions, q, k, cos_sin, interleaved)
    write(k, v, kv_cache, slot_mapping)
    return q
