"""Normalisation, activation and rotary embedding with aiter."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from atom.model_ops.kernels.aiter.support import dense_rows, requires
from atom.model_ops.kernels.probe import EntryPoint, function

# aiter's constant for halves instead of interleaved pairs.
_NEOX = 0

_NORM = EntryPoint("aiter.ops.rmsnorm:rmsnorm2d_fwd", "input weight epsilon")
_ADD_NORM = EntryPoint(
    "aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add",
    "out input residual_in residual_out weight epsilon",
)
_SILU = EntryPoint("aiter.ops.activation:silu_and_mul", "out input")
_ROPE = EntryPoint(
    "aiter.ops.rope:rope_cached_positions_2c_fwd_inplace",
    "input_x input_y cos sin positions rotate_style reuse_freqs_front_part nope_first",
)

refuses_norm = requires(_NORM)
refuses_add_norm = requires(_ADD_NORM)
refuses_silu = requires(_SILU)
refuses_rope = requires(_ROPE)

# Cosine and sine tables in aiter's layout, by source table.
_tables = WeakTensorKeyDictionary()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., size] -> [..., size]. Rows may be strided, as in slices of a fused product."""
    out: torch.Tensor = function(_NORM)(_rows(x), weight, eps)
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(norm(x + residual), x + residual)`."""
    rows, residual_rows = _rows(x).contiguous(), _rows(residual).contiguous()
    out, total = torch.empty_like(rows), torch.empty_like(rows)
    function(_ADD_NORM)(out, rows, residual_rows, total, weight, eps)
    return out.view(x.shape), total.view(x.shape)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """[..., 2 * d], gate then up -> silu(gate) * up, [..., d]."""
    rows = _rows(x).contiguous()
    out = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
    function(_SILU)(out, rows)
    return out.view(*x.shape[:-1], out.shape[1])


def rope(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [T, heads, d] and k [T, kv_heads, d] by position, out of place.

    The kernel rotates in place, so it gets a copy, in which interleaved pairs are already
    rearranged as halves (the output order). It takes [1, T, heads, rotary_dim] and tables
    [positions, 1, 1, rotary_dim / 2] that serve both halves. Assumes that float32 tables work with
    any head dtype, and that a slice of each head may be passed.
    """
    if cos_sin not in _tables:
        _tables[cos_sin] = [x.contiguous() for x in cos_sin[:, None, None].chunk(2, dim=-1)]
    q, k = _copy(q, interleaved), _copy(k, interleaved)
    heads = (x[None, ..., : cos_sin.shape[1]] for x in (q, k))
    function(_ROPE)(*heads, *_tables[cos_sin], positions[None], _NEOX, True, False)
    return q, k


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., size] -> [rows, size], a view where the layout allows it."""
    return dense_rows(x.reshape(-1, x.shape[-1]))


def _copy(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return x.clone(memory_format=torch.contiguous_format)
