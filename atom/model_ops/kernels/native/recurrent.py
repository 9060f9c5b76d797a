"""Layers with a recurrent state: convolution, gates, delta rule and gated norm."""

from __future__ import annotations

import torch

from atom.model_ops.attention.metadata import StateMetadata
from atom.model_ops.kernels.native.bindings import Kernels, mismatch, num_threads, rows_apart
from atom.model_ops.kernels.torch.recurrent import (
    NORM_EPS,
    check_conv,
    check_gates,
    check_norm,
    check_rule,
)

_conv = Kernels("causal_conv", "8P10q")
_gates = Kernels("delta_gates", "6P7qd")
_delta = Kernels("delta_rule", "11P14qd")
_norm = Kernels("gated_rms_norm", "4P9qd")


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, ring: torch.Tensor, metadata: StateMetadata
) -> torch.Tensor:
    """As `kernels/torch/recurrent.py`, quickest where the channels of `weight` lie side by side.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: when a sequence's numbers are out of range.
    """
    (tokens, channels), (pool_rows, ring_len, _) = x.shape, ring.shape
    taps = weight.shape[1]
    check_conv(x, weight, ring)
    if not ring.is_contiguous():
        raise mismatch("causal_conv", x=x, weight=weight, ring=ring)
    x, stride = rows_apart(x)
    out = x.new_empty(tokens, channels)
    pointers = x.data_ptr(), weight.data_ptr(), ring.data_ptr(), out.data_ptr()
    places, *sizes = _sequences(metadata, tokens, pool_rows)
    layout = channels, taps, ring_len, stride, *weight.stride(), num_threads()
    _check(metadata, pool_rows, _conv(x.dtype, *pointers, *places, *sizes, *layout))
    return out


def delta_gates(
    decay: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels/torch/recurrent.py`.

    Raises:
        ValueError: when shapes or data types do not fit.
    """
    rows, heads, decays = decay.shape
    check_gates(decay, beta, a_log, dt_bias)
    if not (a_log.is_contiguous() and dt_bias.is_contiguous()):
        raise mismatch("delta_gates", decay=decay, beta=beta, a_log=a_log, dt_bias=dt_bias)
    decay, stride = rows_apart(decay)
    beta, beta_stride = rows_apart(beta)
    log_decay = decay.new_empty(rows, heads, decays, dtype=torch.float32)
    betas = decay.new_empty(rows, heads, dtype=torch.float32)
    inputs = decay.data_ptr(), beta.data_ptr(), a_log.data_ptr(), dt_bias.data_ptr()
    sizes = rows, heads, decays, stride, beta_stride, lower_bound is not None, num_threads()
    outputs = log_decay.data_ptr(), betas.data_ptr()
    _gates(decay.dtype, *inputs, *outputs, *sizes, lower_bound or 0.0)
    return log_decay, betas


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    metadata: StateMetadata,
) -> torch.Tensor:
    """As `kernels/torch/recurrent.py`.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: when a sequence's numbers are out of range.
    """
    (tokens, key_heads, key), (_, heads, value) = q.shape, v.shape
    pool_rows, versions, decays = *states.shape[:2], log_decay.shape[-1]
    check_rule(q, k, v, log_decay, beta, states)
    if not all(x.is_contiguous() for x in (log_decay, beta, states)):
        raise mismatch("delta_rule", q=q, k=k, v=v, log_decay=log_decay, beta=beta, states=states)
    (q, q_stride), (k, k_stride), (v, v_stride) = rows_apart(q), rows_apart(k), rows_apart(v)
    out = v.new_empty(tokens, heads, value)
    inputs = q.data_ptr(), k.data_ptr(), v.data_ptr(), log_decay.data_ptr(), beta.data_ptr()
    places, *sizes = _sequences(metadata, tokens, pool_rows)
    pointers = *inputs, states.data_ptr(), out.data_ptr(), *places
    layout = key_heads, heads, key, value, decays, versions, q_stride, k_stride, v_stride
    is_half = states.dtype is torch.bfloat16
    wrong = _delta(q.dtype, *pointers, *sizes, *layout, is_half, num_threads(), NORM_EPS)
    _check(metadata, pool_rows, wrong)
    return out


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str
) -> torch.Tensor:
    """As `kernels/torch/recurrent.py`.

    Raises:
        ValueError: when shapes or data types do not fit, and for another activation.
    """
    check_norm(x, gate, weight, activation)
    rows, heads, size = x.shape
    x, gate = (t if t.stride(2) == 1 else t.contiguous() for t in (x, gate))
    weight = weight.contiguous()
    out = x.new_empty(rows, heads, size)
    pointers = x.data_ptr(), gate.data_ptr(), weight.data_ptr(), out.data_ptr()
    sizes = rows, heads, size, *x.stride()[:2], *gate.stride()[:2]
    _norm(x.dtype, *pointers, *sizes, activation == "silu", num_threads(), eps)
    return out


def _sequences(
    metadata: StateMetadata, tokens: int, pool_rows: int
) -> tuple[tuple[int, int, int, int], int, int, int]:
    """The pointers and numbers of the C++ struct.

    Raises:
        ValueError: when they are not what it reads.
    """
    rows, lens, starts = metadata.rows, metadata.context_lens, metadata.cu_seqlens_q
    padding = metadata.padding_lens
    numbers = (lens, starts) if padding is None else (lens, starts, padding)
    fits = rows.dtype is torch.int64 and all(x.dtype is torch.int32 for x in numbers)
    fits = fits and all(x.is_contiguous() for x in (rows, *numbers))
    if not fits or len(starts) != len(rows) + 1 or len(lens) != len(rows):
        raise mismatch("states", rows=rows, context_lens=lens, cu_seqlens_q=starts)
    places = rows.data_ptr(), lens.data_ptr(), starts.data_ptr()
    return (*places, 0 if padding is None else padding.data_ptr()), tokens, len(rows), pool_rows


def _check(metadata: StateMetadata, pool_rows: int, wrong: int) -> None:
    """Raises:
    IndexError: when a kernel named a sequence.
    """
    if wrong:
        s = wrong - 1
        padding = 0 if metadata.padding_lens is None else int(metadata.padding_lens[s])
        raise IndexError(
            f"sequence {s} has row {int(metadata.rows[s])} of {pool_rows}, context length "
            f"{int(metadata.context_lens[s])} and query rows "
            f"{metadata.cu_seqlens_q[s : s + 2].tolist()}, {padding} of them padding"
        )
