"""Batches of sequences with recurrent states, and a pool of states, without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from model_ops.native_numbers import random

from atom.model_ops.attention.metadata import StateMetadata

ROWS, VERSIONS = 6, 4


def metadata_of(*parts: tuple[int, int, int], padding: Sequence[int] = ()) -> StateMetadata:
    """Of (row, start, tokens) of each sequence, padding included."""
    rows, starts, counts = (list(values) for values in zip(*parts, strict=True))
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    int32 = {"dtype": torch.int32}
    return StateMetadata(
        rows=torch.tensor(rows),
        context_lens=torch.tensor(ends, **int32),
        cu_seqlens_q=F.pad(torch.tensor(counts).cumsum(0), (1, 0)).int(),
        padding_lens=torch.tensor(padding, **int32) if padding else None,
        query_lens_cpu=tuple(counts),
    )


@dataclass(frozen=True)
class Inputs:
    """Of the delta rule."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def random(
        cls, shape: tuple[int, ...], tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> Inputs:
        key_heads, heads, key, value, decays = shape
        both = random(tokens, 2 * key_heads * key, dtype=dtype, seed=seed)
        both = both.unflatten(1, (2, -1))
        q, k = (both[:, i].unflatten(1, (key_heads, key)) for i in (0, 1))  # rows that lie apart
        v = random(tokens, heads, value, dtype=dtype, seed=seed + 1)
        decay = -F.softplus(random(tokens, heads, decays, seed=seed + 2))
        return cls(q, k, v, decay, random(tokens, heads, seed=seed + 3).sigmoid())

    def part(self, begin: int, end: int) -> Inputs:
        return Inputs(*(tensor[begin:end] for tensor in vars(self).values()))

    def to(self, device: torch.device) -> Inputs:
        return Inputs(*(tensor.to(device) for tensor in vars(self).values()))

    def run(self, ops: ModuleType, states: torch.Tensor, metadata: StateMetadata) -> torch.Tensor:
        out: torch.Tensor = ops.delta_rule(*vars(self).values(), states, metadata)
        return out


def join(parts: Sequence[Inputs]) -> Inputs:
    lists = [vars(part).values() for part in parts]
    return Inputs(*(torch.cat(tensors) for tensors in zip(*lists, strict=True)))


def pool(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, rows: int = ROWS
) -> torch.Tensor:
    """Nothing that a sequence has not written may be read as a number."""
    _, heads, key, value, _ = shape
    return torch.full((rows, VERSIONS, heads, key, value), float("nan"), dtype=dtype)


def exact(inputs: Inputs, stored: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the delta rule and states after each token, in float64 but for their rounding."""
    q, k, v, log_decay, beta = (tensor.double() for tensor in vars(inputs).values())
    repeats = v.shape[1] // q.shape[1]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(repeats, 1) for x in (q / q.shape[2] ** 0.5, k))
    state = torch.zeros(v.shape[1], q.shape[2], v.shape[2], dtype=torch.float64)
    outs, states = [], []
    for t in range(len(q)):
        state = state * log_decay[t].exp()[..., None]
        error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], error * beta[t, :, None])
        outs.append(torch.einsum("hk,hkv->hv", q[t], state))
        state = state.to(stored).double()
        states.append(state)
    return torch.stack(outs), torch.stack(states)
