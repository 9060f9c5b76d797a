"""Layers with a recurrent state: convolution, gates, delta rule and gated norm.

Every number of tokens goes through the same kernels in the same order, so the bits do not depend on
how a sequence is cut into steps. Prompts take one token of the delta rule after the other, too;
`delta_chunks.py` takes many at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import StateMetadata
from atom.model_ops.kernels.torch.recurrent import (
    NORM_EPS,
    check_conv,
    check_gates,
    check_norm,
    check_rule,
)
from atom.model_ops.registry import OpQuery

# A program keeps all rows of some columns of a state in registers.
_LARGEST_KEY = 256
_STATE_TILE = 4096
_CONV_TOKENS, _CONV_CHANNELS = 16, 64
_GATE_TILE = 1024
# Tokens that `delta_chunks.py` takes at once, from one multiple of this to the next.
CHUNK = 64
METADATA = ["rows_ptr", "lens_ptr", "starts_ptr", "padding_ptr"]


def refuses_delta(query: OpQuery) -> str | None:
    """Why states of this size are not supported; None if they are."""
    key = query.shape["key_dim"]
    return f"key_dim={key} is larger than {_LARGEST_KEY}" if key > _LARGEST_KEY else None


@triton.jit
def span(sequence, lens_ptr, starts_ptr, padding_ptr):
    """Where a sequence's tokens begin, how many there are, how many of them are real, and the
    position of the first.
    """
    begin = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - begin
    start = tl.load(lens_ptr + sequence) - length
    real = length
    if padding_ptr is not None:
        real = length - tl.load(padding_ptr + sequence)
    return begin, length, real, start


@triton.jit
def by_chunks(start, real, CHUNK: tl.constexpr):
    """How many of a sequence's tokens go by chunks: those before the last border of the grid, if a
    whole chunk is among them.
    """
    end = (start + real) // CHUNK * CHUNK
    whole = end - (start + CHUNK - 1) // CHUNK * CHUNK
    return tl.where(whole > 0, end - start, 0)


@triton.jit(do_not_specialize=["keeps"], do_not_specialize_on_alignment=METADATA)
def _convolve(
    out_ptr, x_ptr, weight_ptr, ring_ptr, rows_ptr, lens_ptr, starts_ptr, padding_ptr,
    x_stride, channel_stride, tap_stride, keeps,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, tiles of TOKENS of their tokens, tiles of channels.

    keeps: whether inputs go to the ring here, which is right where no program reads what another
    one writes.
    """
    sequence = tl.program_id(0)
    begin, length, real, start = span(sequence, lens_ptr, starts_ptr, padding_ptr)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = channels < CHANNELS
    exists = tokens < length
    ring_ptr += tl.load(rows_ptr + sequence) * RING * CHANNELS
    x_ptr += begin.to(tl.int64) * x_stride
    total = tl.zeros([TOKENS, TILE], tl.float32)
    for tap in tl.static_range(TAPS):
        at = tokens - (TAPS - 1) + tap
        here = (exists & (at >= 0))[:, None] & inside[None, :]
        x = tl.load(x_ptr + at.to(tl.int64)[:, None] * x_stride + channels[None, :], here, 0.0)
        position = start + at
        earlier = (exists & (at < 0) & (position >= 0))[:, None] & inside[None, :]
        slots = (position + RING) % RING * CHANNELS
        x += tl.load(ring_ptr + slots[:, None] + channels[None, :], earlier, 0.0)
        weights = weight_ptr + channels * channel_stride + tap * tap_stride
        weight = tl.load(weights, inside, 0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    result = (total / (1.0 + tl.exp(-total))).to(out_ptr.dtype.element_ty)
    outs = out_ptr + (begin + tokens).to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tl.store(outs, result, mask=exists[:, None] & inside[None, :])
    if keeps != 0:
        kept = ((tokens < real) & (tokens >= real - RING))[:, None] & inside[None, :]
        x = tl.load(x_ptr + tokens.to(tl.int64)[:, None] * x_stride + channels[None, :], kept, 0.0)
        slots = (start + tokens) % RING * CHANNELS
        tl.store(ring_ptr + slots[:, None] + channels[None, :], x, mask=kept)


@triton.jit(do_not_specialize_on_alignment=METADATA)
def _keep_inputs(
    x_ptr, ring_ptr, rows_ptr, lens_ptr, starts_ptr, padding_ptr, x_stride,
    CHANNELS: tl.constexpr, RING: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, tiles of channels. The newest input of each slot, if one of these is."""
    sequence = tl.program_id(0)
    begin, _, real, start = span(sequence, lens_ptr, starts_ptr, padding_ptr)
    slots = tl.arange(0, SLOTS)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    newest = real - 1 - (start + real - 1 - slots + RING) % RING
    kept = ((slots < RING) & (newest >= 0))[:, None] & (channels < CHANNELS)[None, :]
    x_ptr += begin.to(tl.int64) * x_stride
    x = tl.load(x_ptr + newest.to(tl.int64)[:, None] * x_stride + channels[None, :], kept, 0.0)
    ring_ptr += tl.load(rows_ptr + sequence) * RING * CHANNELS
    tl.store(ring_ptr + slots[:, None] * CHANNELS + channels[None, :], x, mask=kept)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, ring: torch.Tensor, metadata: StateMetadata
) -> torch.Tensor:
    """As `kernels/torch/recurrent.py`.

    Raises:
        ValueError: when shapes or data types do not fit.
    """
    check_conv(x, weight, ring)
    (tokens, channels), ring_len, taps = x.shape, ring.shape[1], weight.shape[1]
    out = x.new_empty(tokens, channels)
    if out.numel() == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    ring = ring.view(-1)
    numbers = numbers_of(metadata)
    longest, sequences = max(metadata.query_lens_cpu), len(metadata.query_lens_cpu)
    # What is written at once lies beside what is read.
    keeps = longest <= ring_len - (taps - 1)
    tiles = triton.cdiv(channels, _CONV_CHANNELS)
    _convolve[(sequences, triton.cdiv(longest, _CONV_TOKENS), tiles)](
        *(out, x, weight, ring, *numbers, x.stride(0), *weight.stride(), int(keeps)),
        CHANNELS=channels,
        TAPS=taps,
        RING=ring_len,
        TOKENS=_CONV_TOKENS,
        TILE=_CONV_CHANNELS,
        num_warps=4,
    )
    if not keeps:
        _keep_inputs[(sequences, tiles)](
            *(x, ring, *numbers, x.stride(0)),
            CHANNELS=channels,
            RING=ring_len,
            SLOTS=triton.next_power_of_2(ring_len),
            TILE=_CONV_CHANNELS,
            num_warps=4,
        )
    return out


@triton.jit
def _gate(
    decay_ptr, beta_ptr, a_log_ptr, bias_ptr, log_decay_ptr, betas_ptr,
    decay_stride, beta_stride, lower_bound,
    HEADS: tl.constexpr, DECAYS: tl.constexpr, BOUNDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, tiles of a token's decays; the first HEADS of them have its betas, too."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < HEADS * DECAYS
    x = tl.load(decay_ptr + token * decay_stride + columns, mask, 0.0).to(tl.float32)
    x += tl.load(bias_ptr + columns, mask, 0.0)
    rate = tl.exp(tl.load(a_log_ptr + columns // DECAYS, mask, 0.0))
    if BOUNDED:
        result = lower_bound / (1.0 + tl.exp(-rate * x))
    else:
        result = -rate * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
    tl.store(log_decay_ptr + token * HEADS * DECAYS + columns, result, mask=mask)
    heads = columns < HEADS
    beta = tl.load(beta_ptr + token * beta_stride + columns, heads, 0.0).to(tl.float32)
    tl.store(betas_ptr + token * HEADS + columns, 1.0 / (1.0 + tl.exp(-beta)), mask=heads)


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
    check_gates(decay, beta, a_log, dt_bias)
    tokens, heads, decays = decay.shape
    log_decay = torch.empty(tokens, heads, decays, dtype=torch.float32, device=decay.device)
    betas = torch.empty(tokens, heads, dtype=torch.float32, device=decay.device)
    if log_decay.numel() == 0:
        return log_decay, betas
    decay = decay if decay.stride()[1:] == (decays, 1) else decay.contiguous()
    beta = beta if beta.stride(1) == 1 else beta.contiguous()
    tile = min(triton.next_power_of_2(heads * decays), _GATE_TILE)
    _gate[(tokens, triton.cdiv(heads * decays, tile))](
        *(decay, beta, a_log.contiguous(), dt_bias.contiguous(), log_decay, betas),
        *(decay.stride(0), beta.stride(0), lower_bound or 0.0),
        HEADS=heads,
        DECAYS=decays,
        BOUNDED=lower_bound is not None,
        TILE=tile,
        num_warps=4,
    )
    return log_decay, betas


@triton.jit
def _normed_key(x_ptr, offsets, mask, eps):
    x = tl.load(x_ptr + offsets, mask, 0.0).to(tl.float32)
    return x / tl.sqrt(tl.sum(x * x, axis=0) + eps)


@triton.jit(do_not_specialize=["behind_chunks"], do_not_specialize_on_alignment=METADATA)
def _delta_rule(
    out_ptr, q_ptr, k_ptr, v_ptr, log_decay_ptr, beta_ptr, states_ptr,
    rows_ptr, lens_ptr, starts_ptr, padding_ptr,
    q_stride, k_stride, v_stride, scale, eps, behind_chunks,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    DECAYS: tl.constexpr, VERSIONS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, heads, tiles of the columns of a state, which a program keeps.

    behind_chunks: 1 where the tokens that `by_chunks` counts are done, else 0.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, length, real, start = span(sequence, lens_ptr, starts_ptr, padding_ptr)
    done = by_chunks(start, real, CHUNK) * behind_chunks
    begin, length, real, start = begin + done, length - done, real - done, start + done
    key_head = head // (HEADS // KEY_HEADS)
    r = tl.arange(0, ROWS)
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)
    in_key, in_value = r < KEY, columns < VALUE
    mask = in_key[:, None] & in_value[None, :]
    states_ptr += tl.load(rows_ptr + sequence) * (VERSIONS * HEADS * KEY * VALUE)
    states_ptr += head * KEY * VALUE + r[:, None] * VALUE + columns[None, :]
    newest = ((start + VERSIONS - 1) % VERSIONS).to(tl.int64) * (HEADS * KEY * VALUE)
    state = tl.load(states_ptr + newest, mask & (start > 0) & (real > 0), 0.0).to(tl.float32)
    for t in range(real):
        token = (begin + t).to(tl.int64)
        q = _normed_key(q_ptr + token * q_stride + key_head * KEY, r, in_key, eps) * scale
        k = _normed_key(k_ptr + token * k_stride + key_head * KEY, r, in_key, eps)
        v = tl.load(v_ptr + token * v_stride + head * VALUE + columns, in_value, 0.0)
        at = token * HEADS + head
        if DECAYS == 1:
            state *= tl.exp(tl.load(log_decay_ptr + at))
        else:
            decay = tl.exp(tl.load(log_decay_ptr + at * DECAYS + r, in_key, 0.0))
            state *= decay[:, None]
        error = v.to(tl.float32) - tl.sum(state * k[:, None], axis=0)
        state += k[:, None] * (error * tl.load(beta_ptr + at))[None, :]
        out = tl.sum(state * q[:, None], axis=0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at * VALUE + columns, out, mask=in_value)
        rounded = state.to(states_ptr.dtype.element_ty)
        if t >= real - VERSIONS:
            version = ((start + t) % VERSIONS).to(tl.int64) * (HEADS * KEY * VALUE)
            tl.store(states_ptr + version, rounded, mask=mask)
        state = rounded.to(tl.float32)
    zero = tl.zeros([TILE], out_ptr.dtype.element_ty)
    for t in range(real, length):
        at = (begin + t).to(tl.int64) * HEADS + head
        tl.store(out_ptr + at * VALUE + columns, zero, mask=in_value)


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
    """
    check_rule(q, k, v, log_decay, beta, states)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    q, k, v = apart_by_tokens(q, k, v)
    walk_tokens(out, q, k, v, log_decay.contiguous(), beta.contiguous(), states, metadata)
    return out


def walk_tokens(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    metadata: StateMetadata,
    behind_chunks: bool = False,
) -> None:
    """Write the rows of `out`, and states, token by token.

    Args:
        behind_chunks: whether tokens that go by chunks are done, and the state behind them is in
            the pool.
    """
    if out.numel() == 0:
        return
    (_, key_heads, key), (_, heads, value) = q.shape, v.shape
    rows = triton.next_power_of_2(key)
    tile = min(triton.next_power_of_2(value), max(_STATE_TILE // rows, 1))
    _delta_rule[(len(metadata.query_lens_cpu), heads, triton.cdiv(value, tile))](
        *(out, q, k, v, log_decay, beta, states.view(-1), *numbers_of(metadata)),
        *(q.stride(0), k.stride(0), v.stride(0), key**-0.5, NORM_EPS, int(behind_chunks)),
        KEY_HEADS=key_heads,
        HEADS=heads,
        KEY=key,
        VALUE=value,
        DECAYS=log_decay.shape[2],
        VERSIONS=states.shape[1],
        ROWS=rows,
        TILE=tile,
        CHUNK=CHUNK,
        num_warps=4,
    )


def apart_by_tokens(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[T, heads, size] each, so that only the tokens may lie apart."""
    return tuple(x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in parts)


def numbers_of(metadata: StateMetadata) -> tuple[torch.Tensor | None, ...]:
    """What kernels read of each sequence."""
    return metadata.rows, metadata.context_lens, metadata.cu_seqlens_q, metadata.padding_lens


@triton.jit
def _gated_norm(
    out_ptr, x_ptr, gate_ptr, weight_ptr,
    x_stride, x_head_stride, gate_stride, gate_head_stride, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, heads."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x_ptr += token * x_stride + head * x_head_stride
    gate_ptr += token * gate_stride + head * gate_head_stride
    x = tl.load(x_ptr + columns, mask, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + columns, mask, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask, 0.0).to(tl.float32)
    normed = x / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight
    opened = 1.0 / (1.0 + tl.exp(-gate))
    if SILU:
        opened *= gate
    result = (normed * opened).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * HEADS + head) * SIZE + columns, result, mask=mask)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str
) -> torch.Tensor:
    """As `kernels/torch/recurrent.py`.

    Raises:
        ValueError: when shapes or data types do not fit, and for another activation.
    """
    check_norm(x, gate, weight, activation)
    tokens, heads, size = x.shape
    out = x.new_empty(tokens, heads, size)
    if out.numel() == 0:
        return out
    x, gate = (t if t.stride(2) == 1 else t.contiguous() for t in (x, gate))
    block = triton.next_power_of_2(size)
    _gated_norm[(tokens, heads)](
        *(out, x, gate, weight.contiguous(), *x.stride()[:2], *gate.stride()[:2], eps),
        HEADS=heads,
        SIZE=size,
        BLOCK=block,
        SILU=activation == "silu",
        num_warps=min(max(block // 256, 1), 8),
    )
    return out
