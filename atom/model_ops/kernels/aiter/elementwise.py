"""Normalisation, activation and rotation by aiter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from atom.model_ops.kernels.aiter import probe
from atom.model_ops.kernels.aiter.support import dense_rows

# aiter's number for pairs that lie half a head apart.
_NEOX = 0

RopeOp = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool],
    "tuple[torch.Tensor, torch.Tensor]",
]


def load_rms_norm() -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    norm = probe.function("rmsnorm2d_fwd")

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[..., size] -> [..., size]. Rows may lie apart, as slices of a product's output do."""
        out: torch.Tensor = norm(_rows(x), weight, eps)
        return out.view(x.shape)

    return rms_norm


def load_add_rms_norm() -> Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
]:
    add_norm = probe.function("rmsnorm2d_fwd_with_add")

    def add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(norm(x + residual), x + residual)`."""
        rows, residual_rows = _rows(x).contiguous(), _rows(residual).contiguous()
        out, total = torch.empty_like(rows), torch.empty_like(rows)
        add_norm(out, rows, residual_rows, total, weight, eps)
        return out.view(x.shape), total.view(x.shape)

    return add_rms_norm


def load_silu_and_mul() -> Callable[[torch.Tensor], torch.Tensor]:
    activate = probe.function("silu_and_mul")

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        """[..., 2 * d] holding gate and up side by side -> [..., d]."""
        rows = _rows(x).contiguous()
        out = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
        activate(out, rows)
        return out.view(*x.shape[:-1], out.shape[1])

    return silu_and_mul


def load_rope() -> RopeOp:
    rotate = probe.function("rope_cached_positions_2c_fwd_inplace")
    tables = WeakTensorKeyDictionary()

    def rope(
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q [T, heads, d] and k [T, kv_heads, d] by position, out of place.

        The kernel rotates in place, so it gets a copy: of interleaved pairs one in which they
        lie as halves already, the order in which they are to leave. It takes [1, T, heads,
        rotary_dim] and dense tables [positions, 1, 1, rotary_dim / 2] whose entries serve both
        halves. Takes for granted that float32 tables go with any type of head, and that a slice
        of each head may be given.
        """
        if cos_sin not in tables:
            tables[cos_sin] = [x.contiguous() for x in cos_sin[:, None, None].chunk(2, dim=-1)]
        q, k = _copy(q, interleaved), _copy(k, interleaved)
        heads = (x[None, ..., : cos_sin.shape[1]] for x in (q, k))
        rotate(*heads, *tables[cos_sin], positions[None], _NEOX, True, False)
        return q, k

    return rope


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., size] -> [rows, size], a view where the layout allows it."""
    return dense_rows(x.reshape(-1, x.shape[-1]))


def _copy(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return x.clone(memory_format=torch.contiguous_format)
