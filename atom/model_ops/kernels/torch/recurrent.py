"""What a layer with a recurrent state computes: its convolution, its gates and the delta rule.

Token by token in float32, in one order whatever the batch is and however its sequences were cut
into steps: T tokens in one call have the bits of T calls, since a state is rounded to the pool's
type behind every token. On a CPU that is but for exponentials, whose last bit depends in torch on
where a number lies among others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom.model_ops.attention.metadata import StateMetadata
from atom.model_ops.kernels.operands import mismatch

# Of the norms of queries and keys (Qwen3-Next, Kimi-Linear).
NORM_EPS = 1e-6


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, ring: torch.Tensor, metadata: StateMetadata
) -> torch.Tensor:
    """SiLU of the causal convolution along each sequence, channel by channel: [T, C].

    The ring keeps the last raw inputs of each sequence, that of position p at p mod ring_len. Those
    before position 0 are zeros, whatever the ring holds. Rows of padding are anything.

    Args:
        x: [T, C] raw inputs.
        weight: [C, W] in x's dtype; the last of W is for the token itself.
        ring: [pool_rows, ring_len, C] in x's dtype; changed. ring_len is at least W - 1 and the
            most tokens whose last ones may be rejected.
    """
    out = torch.zeros_like(x)
    before, ring_len = weight.shape[1] - 1, ring.shape[1]
    taps = weight.float()
    back = torch.arange(-before, 0, device=x.device)
    slots = torch.arange(ring_len, device=x.device)
    for s, (begin, end) in enumerate(_spans(metadata)):
        row = metadata.rows[s : s + 1]
        start, count = metadata.starts[s : s + 1].long(), _real_tokens(metadata, s)
        old = ring.index_select(0, row)[0]
        earlier = torch.where((start + back >= 0)[:, None], old[(start + back) % ring_len], 0)
        inputs = torch.cat((earlier, x[begin:end]))
        sums = torch.zeros(end - begin, x.shape[1], device=x.device)
        for tap in range(before + 1):
            sums += inputs[tap : tap + end - begin].float() * taps[:, tap]
        out[begin:end] = F.silu(sums)
        # The newest token of each slot, if one of these is.
        newest = count - 1 - (start + count - 1 - slots) % ring_len
        kept = torch.where((newest >= 0)[:, None], inputs[before + newest.clamp(min=0)], old)
        ring.index_copy_(0, row, kept[None])
    return out


def delta_gates(
    decay: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decays [T, heads, n] and betas [T, heads] of the delta rule, in float32.

    Log decays are -exp(a_log) softplus(decay + dt_bias) (Gated DeltaNet, Kimi-Linear), or with a
    bound lower_bound sigmoid(exp(a_log) (decay + dt_bias)) (Kimi-K3). Betas are sigmoids.

    Args:
        decay: [T, heads, n]; n is 1, or one for each channel of keys.
        beta: [T, heads].
        a_log: [heads] float32.
        dt_bias: [heads, n] float32.
        lower_bound: negative.
    """
    rates, shifted = a_log.exp()[:, None], decay.float() + dt_bias
    if lower_bound is None:
        log_decay = -rates * F.softplus(shifted)
    else:
        log_decay = lower_bound * torch.sigmoid(rates * shifted)
    return log_decay, beta.float().sigmoid()


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    metadata: StateMetadata,
) -> torch.Tensor:
    """The gated delta rule (https://arxiv.org/abs/2412.06464, 2510.26692), [T, HV, V] in v's dtype.

    With q and k divided by their lengths, and q by sqrt(K), a token makes of the state S [K, V] of
    each head

        S = exp(log_decay) S;  S += k beta (v - k S);  out = q S

    A sequence goes on from the version of its first position - 1, from zeros at position 0, and
    writes those of its last tokens (`StateMetadata`). The next token reads S in the type of
    `states`, which `out` is not rounded to. Rows of padding are zeros.

    Args:
        q, k: [T, HK, K]; value head h reads key head h // (HV / HK).
        v: [T, HV, V].
        log_decay: [T, HV, K] or [T, HV, 1] float32, at most 0.
        beta: [T, HV] float32.
        states: [pool_rows, versions, HV, K, V] float32 or bfloat16; changed.
    """
    repeats, versions = v.shape[1] // q.shape[1], states.shape[1]
    q, k = (_normed(x).repeat_interleave(repeats, dim=1)[..., None] for x in (q, k))
    q = q * k.shape[2] ** -0.5
    decays, values = log_decay.exp()[..., None], v.float()
    flat = states.view(-1, *states.shape[2:])
    out = torch.zeros_like(v)
    for s, (begin, end) in enumerate(_spans(metadata)):
        start, count = metadata.starts[s : s + 1].long(), _real_tokens(metadata, s)
        places = metadata.rows[s : s + 1] * versions
        # A select, since what no sequence has written may be NaN.
        state = flat.index_select(0, places + (start - 1) % versions)
        state = torch.where((start > 0)[:, None, None, None], state, 0.0)[0].float()
        first_kept = 0 if metadata.padding_lens is not None else end - begin - versions
        for t, token in enumerate(range(begin, end)):
            state = state * decays[token]
            error = values[token] - (state * k[token]).sum(dim=1)
            state = state + k[token] * (error * beta[token, :, None])[:, None]
            result = (state * q[token]).sum(dim=1)
            out[token] = torch.where(t < count, result, 0.0)
            rounded = state.to(states.dtype)
            state = rounded.float()
            if t >= first_kept:
                place = places + (start + t) % versions
                kept = torch.where(t < count, rounded, flat.index_select(0, place)[0])
                flat.index_copy_(0, place, kept[None])
    return out


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str
) -> torch.Tensor:
    """The norm of each head times its gate, rounded once: [T, heads, size].

    Args:
        x, gate: [T, heads, size].
        weight: [size], of all heads.
        activation: of the gate, "silu" (Gated DeltaNet) or "sigmoid" (Kimi-Linear).

    Raises:
        ValueError: for another activation.
    """
    check_activation(activation)
    wide, opened = x.float(), gate.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    opened = F.silu(opened) if activation == "silu" else opened.sigmoid()
    return (wide * inverse * weight.float() * opened).to(x.dtype)


def check_activation(activation: str) -> None:
    """Raises:
    ValueError: when a gate has no such activation.
    """
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"gates go through silu or sigmoid, not {activation!r}")


def check_conv(x: torch.Tensor, weight: torch.Tensor, ring: torch.Tensor) -> None:
    """Raises:
    ValueError: when shapes or data types of `causal_conv` do not fit.
    """
    channels, taps = x.shape[1], weight.shape[1]
    fits = weight.shape[0] == ring.shape[2] == channels and ring.shape[1] >= taps - 1
    if not fits or not x.dtype is weight.dtype is ring.dtype:
        raise mismatch("causal_conv", x=x, weight=weight, ring=ring)


def check_gates(
    decay: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> None:
    """Raises:
    ValueError: when shapes or data types of `delta_gates` do not fit.
    """
    rows, heads, decays = decay.shape
    fits = beta.shape == (rows, heads) and decay.dtype is beta.dtype
    fits = fits and a_log.shape == (heads,) and dt_bias.shape == (heads, decays)
    if not fits or not a_log.dtype is dt_bias.dtype is torch.float32:
        raise mismatch("delta_gates", decay=decay, beta=beta, a_log=a_log, dt_bias=dt_bias)


def check_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> None:
    """Raises:
    ValueError: when shapes or data types of `delta_rule` do not fit.
    """
    (tokens, key_heads, key), (_, heads, value), decays = q.shape, v.shape, log_decay.shape[-1]
    fits = k.shape == q.shape and v.shape[0] == tokens and heads % key_heads == 0
    fits = fits and states.shape[2:] == (heads, key, value) and decays in (1, key)
    fits = fits and log_decay.shape == (tokens, heads, decays) and beta.shape == (tokens, heads)
    fits = fits and states.dtype in (torch.float32, torch.bfloat16)
    is_wide = log_decay.dtype is beta.dtype is torch.float32
    if not fits or not is_wide or not q.dtype is k.dtype is v.dtype:
        raise mismatch("delta_rule", q=q, k=k, v=v, log_decay=log_decay, beta=beta, states=states)


def check_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, activation: str) -> None:
    """Raises:
    ValueError: when shapes or data types of `gated_rms_norm` do not fit, and for another
        activation.
    """
    check_activation(activation)
    fits = gate.shape == x.shape and weight.shape == x.shape[2:]
    if not fits or not x.dtype is gate.dtype is weight.dtype:
        raise mismatch("gated_rms_norm", x=x, gate=gate, weight=weight)


def _spans(metadata: StateMetadata) -> list[tuple[int, int]]:
    """Where the tokens of each sequence begin and end."""
    spans, begin = [], 0
    for length in metadata.query_lens_cpu:
        spans.append((begin, begin + length))
        begin += length
    return spans


def _real_tokens(metadata: StateMetadata, s: int) -> torch.Tensor:
    """[1], the tokens of sequence s that are no padding."""
    count = metadata.cu_seqlens_q[s + 1 : s + 2] - metadata.cu_seqlens_q[s : s + 1]
    if metadata.padding_lens is not None:
        count = count - metadata.padding_lens[s : s + 1]
    return count.long()


def _normed(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)
