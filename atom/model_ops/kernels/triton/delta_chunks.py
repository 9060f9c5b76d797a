"""The delta rule of prompts by chunks of 64 tokens, on a grid of positions.

With S the state before a chunk, and G_i what log decays sum up to from the chunk's first token to
its i-th,

    A_ij = beta_i k_i (k_j e^(G_i - G_j))  for j < i,    P_ij = q_i (k_j e^(G_i - G_j))  for j <= i
    U = (I + A)^-1 diag(beta) (V - (K e^G) S)
    out = (Q e^G) S + P U,    S' = e^G_last S + sum_j (k_j e^(G_last - G_j)) U_j

(https://arxiv.org/abs/2412.06464, 2510.26692). Every exponent is a sum of log decays and none a
difference of sums, so none is above 0: nothing overflows, and strong decays cost no precision.

Chunks end where positions are multiples of 64. Those that end in a step go by chunks, all tokens
behind them one by one, as in decoding: so where steps end does not matter on the grid.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import StateMetadata
from atom.model_ops.kernels.torch.recurrent import NORM_EPS, check_rule
from atom.model_ops.kernels.triton import recurrent
from atom.model_ops.kernels.triton.recurrent import CHUNK, METADATA, by_chunks, span
from atom.model_ops.registry import OpQuery
from atom.platform import current_platform

# Rows of A that are solved one by one; more by products. Products want 16 at least.
_BLOCK = 16
_CHANNELS = 16
_ROWS, _COLUMNS = 64, 16
_WARPS = 4 if current_platform().kind == "rocm" else 8
# Of float32 numbers in products, and in those that solve: AMD's matrix units take them as they are.
# NVIDIA's round them to 11 bits, where bfloat16 has 8; three such products are nearly exact.
_PRECISION, _SOLVES = ("tf32", "tf32x3") if current_platform().kind == "cuda" else ("ieee", "ieee")


def refuses(query: OpQuery) -> str | None:
    """Why prompts do not go by chunks; None if they do."""
    if query.dtype is torch.float32 and query.platform.kind == "cuda":
        return "an NVIDIA GPU rounds float32 numbers to 11 bits in products"
    return recurrent.refuses_delta(query)


@triton.jit
def _inverse(
    a, CHUNK: tl.constexpr, BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """(I + a)^-1 for `a` below the diagonal [CHUNK, CHUNK]: blocks on the diagonal by substitution,
    then pairs of blocks. Powers of `a`, which cancel out, are not taken.
    """
    rows, columns = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(rows == columns, 1.0, 0.0)
    in_block = rows // BLOCK == columns // BLOCK
    for j in range(BLOCK - 1):
        factor = tl.sum(tl.where(in_block & (columns % BLOCK == j), a, 0.0), axis=1)
        row = tl.sum(tl.where(rows % BLOCK == j, inverse, 0.0), axis=0)
        changes = in_block & (rows % BLOCK > j)
        inverse -= tl.where(changes, factor[:, None] * row[None, :], 0.0)
    for doubling in tl.static_range(DOUBLINGS):
        size = BLOCK << doubling
        pair = rows // (2 * size) == columns // (2 * size)
        beside = tl.where(pair & (rows // size > columns // size), a, 0.0)
        product = tl.dot(beside, inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, product, input_precision=PRECISION)
    return inverse


@triton.jit
def _relate_across(
    kk, qk, k, q, decays, next_ptrs, exists_next,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what some channels contribute to `_relate`'s products of tokens in different blocks.

    An exponent is split where the later token's block begins, into two that are at most 0.
    """
    r = tl.arange(0, CHUNK)[:, None]
    for block in range(1, CHUNK // BLOCK):
        edge = block * BLOCK
        since = tl.cumsum(tl.where(r >= edge, decays, 0.0), axis=0)
        until = tl.load(next_ptrs, exists_next & (r + 1 < edge), 0.0)
        until = tl.cumsum(until, axis=0, reverse=True)
        later = tl.where(r // BLOCK == block, tl.exp(since), 0.0)
        earlier = tl.trans(tl.where(r < edge, k * tl.exp(until), 0.0))
        kk = tl.dot(k * later, earlier, kk, input_precision=PRECISION)
        qk = tl.dot(q * later, earlier, qk, input_precision=PRECISION)
    return kk, qk


@triton.jit
def _relate_within(
    kk, qk, k, q, k_ptrs, k_stride, next_ptrs, decay_stride, inside, skipped,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds what some channels contribute for tokens of one block, [CHUNK, BLOCK]: an exponential
    for each pair.
    """
    r = tl.arange(0, CHUNK)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros_like(k)
    for back in range(BLOCK):
        j = BLOCK - 1 - back
        step = j - r % BLOCK
        earlier = (step <= 0) & (r + step >= skipped) & inside
        total += tl.load(next_ptrs + step * decay_stride, earlier & (step < 0), 0.0)
        key = tl.load(k_ptrs + step * k_stride, earlier, 0.0).to(tl.float32) * tl.exp(total)
        kk += tl.where(columns == j, tl.sum(k * key, axis=1)[:, None], 0.0)
        qk += tl.where(columns == j, tl.sum(q * key, axis=1)[:, None], 0.0)
    return kk, qk


@triton.jit
def _widen(blocks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """[CHUNK, BLOCK] of tokens and those of their block -> [CHUNK, CHUNK] in their places."""
    rows, columns = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    wide = tl.broadcast_to(blocks[:, None, :], (CHUNK, CHUNK // BLOCK, BLOCK))
    wide = tl.reshape(wide, (CHUNK, CHUNK))
    return tl.where(rows // BLOCK == columns // BLOCK, wide, 0.0)


@triton.jit(do_not_specialize_on_alignment=METADATA)
def _relate(
    pairs_ptr, q_ptr, k_ptr, log_decay_ptr, beta_ptr, lens_ptr, starts_ptr, padding_ptr,
    q_stride, k_stride, scale, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, DECAYS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr, CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr, SOLVES: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, heads, chunks. Two rows [CHUNK] of each token: (I + A)^-1 diag(beta), P."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, _, real, start = span(sequence, lens_ptr, starts_ptr, padding_ptr)
    first = (start // CHUNK + tl.program_id(2)) * CHUNK
    count = by_chunks(start, real, CHUNK)
    if (count == 0) | (first >= start + count):
        return
    r = tl.arange(0, CHUNK)
    # Tokens before the step, if it begins in this chunk.
    skipped = start - first
    exists = r >= skipped
    tokens = (begin - skipped + r).to(tl.int64)
    at = tokens * HEADS + head
    key_head = head // (HEADS // KEY_HEADS)
    rows, columns = r[:, None], r[None, :]
    kk, qk = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    if DECAYS > 1:
        near_kk = tl.zeros([CHUNK, BLOCK], tl.float32)
        near_qk = tl.zeros([CHUNK, BLOCK], tl.float32)
    k_squares, q_squares = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for channel in range(0, KEY, CHANNELS):
        c = channel + tl.arange(0, CHANNELS)[None, :]
        inside = c < KEY
        here = exists[:, None] & inside
        k_ptrs = k_ptr + tokens[:, None] * k_stride + key_head * KEY + c
        raw_k = tl.load(k_ptrs, here, 0.0)
        raw_q = tl.load(q_ptr + tokens[:, None] * q_stride + key_head * KEY + c, here, 0.0)
        k, q = raw_k.to(tl.float32), raw_q.to(tl.float32)
        k_squares += tl.sum(k * k, axis=1)
        q_squares += tl.sum(q * q, axis=1)
        if DECAYS == 1:
            kk = tl.dot(raw_k, tl.trans(raw_k), kk, input_precision=PRECISION)
            qk = tl.dot(raw_q, tl.trans(raw_k), qk, input_precision=PRECISION)
        else:
            decay_ptrs = log_decay_ptr + at[:, None] * KEY + c
            next_ptrs = decay_ptrs + HEADS * KEY
            decays = tl.load(decay_ptrs, here, 0.0)
            exists_next = (rows + 1 >= skipped) & inside
            kk, qk = _relate_across(
                kk, qk, k, q, decays, next_ptrs, exists_next, CHUNK, BLOCK, PRECISION
            )  # fmt: skip
            near_kk, near_qk = _relate_within(
                near_kk, near_qk, k, q, k_ptrs, k_stride, next_ptrs, HEADS * KEY, inside, skipped,
                CHUNK, BLOCK,
            )  # fmt: skip
    if DECAYS == 1:
        decays = tl.load(log_decay_ptr + at, exists, 0.0)
        weight = tl.exp(tl.cumsum(tl.where(rows > columns, decays[:, None], 0.0), axis=0))
        kk *= weight
        qk *= weight
    else:
        kk += _widen(near_kk, CHUNK, BLOCK)
        qk += _widen(near_qk, CHUNK, BLOCK)
    beta = tl.load(beta_ptr + at, exists, 0.0)
    k_inverse = 1.0 / tl.sqrt(k_squares + eps)
    q_inverse = scale / tl.sqrt(q_squares + eps)
    kk *= (beta * k_inverse)[:, None] * k_inverse[None, :]
    qk *= q_inverse[:, None] * k_inverse[None, :]
    pairs = pairs_ptr + at[:, None] * (2 * CHUNK) + columns
    tl.store(pairs + CHUNK, tl.where(rows >= columns, qk, 0.0), mask=exists[:, None])
    solved = _inverse(tl.where(rows > columns, kk, 0.0), CHUNK, BLOCK, DOUBLINGS, SOLVES)
    tl.store(pairs, solved * beta[None, :], mask=exists[:, None])


@triton.jit
def _state_behind(
    state, u, k_ptrs, in_key, decay_ptrs, next_ptrs, has_decay, skipped, upto,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of the state behind the first `upto` tokens of a chunk."""
    r = tl.arange(0, CHUNK)[:, None]
    chosen = (r >= skipped) & (r < upto)
    decays = tl.load(decay_ptrs, chosen & has_decay, 0.0)
    until = tl.load(next_ptrs, (r + 1 >= skipped) & (r + 1 < upto) & has_decay, 0.0)
    until = tl.exp(tl.cumsum(until, axis=0, reverse=True))
    keys = tl.load(k_ptrs, chosen & in_key, 0.0).to(tl.float32) * until
    decay = tl.exp(tl.sum(decays, axis=0))
    return tl.dot(tl.trans(keys), u, state * decay[:, None], input_precision=PRECISION)


@triton.jit(do_not_specialize_on_alignment=METADATA)
def _walk_chunks(
    out_ptr, q_ptr, k_ptr, v_ptr, log_decay_ptr, pairs_ptr, states_ptr,
    rows_ptr, lens_ptr, starts_ptr, padding_ptr, q_stride, k_stride, v_stride, scale, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    DECAYS: tl.constexpr, VERSIONS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, heads, tiles of the columns of a state, which a program keeps, in PARTS of
    ROWS rows.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, _, real, start = span(sequence, lens_ptr, starts_ptr, padding_ptr)
    count = by_chunks(start, real, CHUNK)
    if count == 0:
        return
    end = start + count
    key_head = head // (HEADS // KEY_HEADS)
    r, channels = tl.arange(0, CHUNK), tl.arange(0, ROWS)
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)
    in_value = columns < VALUE
    size: tl.constexpr = HEADS * KEY * VALUE
    states_ptr += tl.load(rows_ptr + sequence) * (VERSIONS * size)
    states_ptr += head * KEY * VALUE + channels[:, None] * VALUE + columns[None, :]
    newest = states_ptr + ((start + VERSIONS - 1) % VERSIONS).to(tl.int64) * size
    states = ()
    for part in tl.static_range(PARTS):
        mask = (part * ROWS + channels < KEY)[:, None] & in_value[None, :] & (start > 0)
        state = tl.load(newest + part * ROWS * VALUE, mask, 0.0).to(tl.float32)
        states = states + (state,)  # type: ignore[assignment]  # noqa: RUF005
    for first in range(start // CHUNK * CHUNK, end, CHUNK):
        skipped = start - first
        exists = (r >= skipped)[:, None]
        tokens = (begin - skipped + r).to(tl.int64)[:, None]
        at = tokens * HEADS + head
        k_ptrs = k_ptr + tokens * k_stride + key_head * KEY + channels[None, :]
        q_ptrs = q_ptr + tokens * q_stride + key_head * KEY + channels[None, :]
        decay_ptrs = log_decay_ptr + at * DECAYS
        if DECAYS > 1:
            decay_ptrs += channels[None, :]
        known = tl.zeros([CHUNK, TILE], tl.float32)
        out = tl.zeros([CHUNK, TILE], tl.float32)
        k_squares, q_squares = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        for part in tl.static_range(PARTS):
            in_key = exists & (part * ROWS + channels < KEY)[None, :]
            # One decay a head has one column.
            has_decay = in_key if DECAYS > 1 else exists
            since = tl.load(decay_ptrs + (part * ROWS if DECAYS > 1 else 0), has_decay, 0.0)
            since = tl.exp(tl.cumsum(since, axis=0))
            k = tl.load(k_ptrs + part * ROWS, in_key, 0.0).to(tl.float32)
            k_squares += tl.sum(k * k, axis=1)
            known = tl.dot(k * since, states[part], known, input_precision=PRECISION)
            q = tl.load(q_ptrs + part * ROWS, in_key, 0.0).to(tl.float32)
            q_squares += tl.sum(q * q, axis=1)
            out = tl.dot(q * since, states[part], out, input_precision=PRECISION)
        k_inverse = (1.0 / tl.sqrt(k_squares + eps))[:, None]
        out *= (scale / tl.sqrt(q_squares + eps))[:, None]
        there = exists & in_value[None, :]
        v_ptrs = v_ptr + tokens * v_stride + head * VALUE + columns[None, :]
        error = tl.load(v_ptrs, there, 0.0).to(tl.float32) - known * k_inverse
        pairs = pairs_ptr + at * (2 * CHUNK) + r[None, :]
        u = tl.dot(tl.load(pairs, exists, 0.0), error, input_precision=PRECISION)
        out = tl.dot(tl.load(pairs + CHUNK, exists, 0.0), u, out, input_precision=PRECISION)
        outs = out_ptr + at * VALUE + columns[None, :]
        tl.store(outs, out.to(out_ptr.dtype.element_ty), mask=there)
        u *= k_inverse
        # At the end also behind the step's last tokens before the chunk's last, drafts perhaps.
        most = tl.minimum(VERSIONS - (start + real - end), count)
        most = tl.where(first + CHUNK == end, tl.maximum(most, 1), 1)
        behind = ()
        for part in tl.static_range(PARTS):
            in_key = (part * ROWS + channels < KEY)[None, :]
            has_decay = in_key if DECAYS > 1 else exists
            decay_part = decay_ptrs + (part * ROWS if DECAYS > 1 else 0)
            state = states[part]
            for back in range(most - 1, -1, -1):
                state = _state_behind(
                    states[part], u, k_ptrs + part * ROWS, in_key,
                    decay_part, decay_part + HEADS * DECAYS, has_decay, skipped,
                    CHUNK - back, CHUNK, PRECISION,
                )  # fmt: skip
                if first + CHUNK == end:
                    version = ((end - 1 - back) % VERSIONS).to(tl.int64) * size
                    in_state = (part * ROWS + channels < KEY)[:, None] & in_value[None, :]
                    rounded = state.to(states_ptr.dtype.element_ty)
                    tl.store(states_ptr + version + part * ROWS * VALUE, rounded, mask=in_state)
            state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
            behind = behind + (state,)  # type: ignore[assignment]  # noqa: RUF005
        states = behind


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    metadata: StateMetadata,
) -> torch.Tensor:
    """As `kernels/torch/recurrent.py`, but that states in bfloat16 are rounded behind each chunk
    instead of each of its tokens.

    Raises:
        ValueError: when shapes or data types do not fit.
    """
    longest = max(metadata.query_lens_cpu, default=0)
    if longest < CHUNK or states.shape[1] > CHUNK:
        return recurrent.delta_rule(q, k, v, log_decay, beta, states, metadata)
    check_rule(q, k, v, log_decay, beta, states)
    (tokens, key_heads, key), (_, heads, value) = q.shape, v.shape
    out = v.new_empty(tokens, heads, value)
    q, k, v = recurrent.apart_by_tokens(q, k, v)
    log_decay, beta = log_decay.contiguous(), beta.contiguous()
    pairs = torch.empty(tokens, heads, 2, CHUNK, dtype=torch.float32, device=v.device)
    sequences, numbers = len(metadata.query_lens_cpu), recurrent.numbers_of(metadata)
    rows = min(max(triton.next_power_of_2(key), 16), _ROWS)
    sizes = {"KEY_HEADS": key_heads, "HEADS": heads, "KEY": key, "DECAYS": log_decay.shape[2]}
    _relate[(sequences, heads, triton.cdiv(longest, CHUNK))](
        *(pairs, q, k, log_decay, beta, *numbers[1:]),
        *(q.stride(0), k.stride(0), key**-0.5, NORM_EPS),
        **sizes,
        CHUNK=CHUNK,
        BLOCK=_BLOCK,
        DOUBLINGS=(CHUNK // _BLOCK).bit_length() - 1,
        CHANNELS=_CHANNELS,
        PRECISION=_PRECISION,
        SOLVES=_SOLVES,
        num_warps=_WARPS,
        num_stages=1,
    )
    _walk_chunks[(sequences, heads, triton.cdiv(value, _COLUMNS))](
        *(out, q, k, v, log_decay, pairs, states.view(-1), *numbers),
        *(q.stride(0), k.stride(0), v.stride(0), key**-0.5, NORM_EPS),
        **sizes,
        VALUE=value,
        VERSIONS=states.shape[1],
        PARTS=triton.cdiv(key, rows),
        ROWS=rows,
        TILE=_COLUMNS,
        CHUNK=CHUNK,
        PRECISION=_PRECISION,
        num_warps=_WARPS,
        num_stages=1,
    )
    recurrent.walk_tokens(out, q, k, v, log_decay, beta, states, metadata, behind_chunks=True)
    return out
