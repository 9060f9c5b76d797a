"""Linear attention by the gated delta rule: a short convolution, then a matrix per head as state.

Gated DeltaNet (arXiv 2412.06464) has one decay per head, Kimi Delta Attention (arXiv 2510.26692)
one per channel of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from atom.model_ops.attention.metadata import StateMetadata
from atom.model_ops.attention.recurrent_layer import RecurrentLayer, StatePart
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import share_of
from atom.model_ops.quant.storage import Cut
from atom.model_ops.weights import copy_weight


class ShortConv(nn.Module):
    """Weights of a causal convolution, channel by channel, of queries, keys and values in turn.

    Args:
        channels: this rank's of each; the checkpoint has them in one tensor, or each in its own.
        taps: tokens that an output depends on.

    Attributes:
        weight: [C, taps], channels side by side; the last tap is for the token itself.
    """

    def __init__(self, channels: Mapping[str, Cut], taps: int, context: LayerContext) -> None:
        super().__init__()
        self._channels = channels
        stored = context.empty(taps, sum(cut.size for cut in channels.values()))
        self.weight = nn.Parameter(stored.data.t(), requires_grad=False)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Load this rank's channels of [channels, 1, taps], of one part or of all.

        Raises:
            ValueError: with both shapes, when they do not fit.
        """
        offset, taps = 0, self.weight.shape[1]
        parts = self._channels if shard is None else {shard: self._channels[shard]}
        total = sum(cut.total for cut in parts.values())
        if tensor.shape not in ((total, 1, taps), (total, taps)):
            raise ValueError(
                f"the checkpoint holds shape {list(tensor.shape)}, the model wants "
                f"{[total, 1, taps]}"
            )
        begins = 0
        for part, cut in self._channels.items():
            if part in parts:
                rows = tensor[begins + cut.start : begins + cut.start + cut.size]
                copy_weight(self.weight[offset : offset + cut.size], rows.view(cut.size, taps))
                begins += cut.total
            offset += cut.size


class DeltaGates(nn.Module):
    """What a head's decay depends on besides its input.

    Args:
        num_heads: of all ranks.
        width: decays of a head.

    Attributes:
        A_log: [heads of this rank] float32.
        dt_bias: [heads of this rank, width] float32.
    """

    def __init__(self, num_heads: int, width: int, context: LayerContext) -> None:
        super().__init__()
        self._share = share_of(context.group, num_heads, "heads of linear attention")
        precise = replace(context, dtype=torch.float32)
        self.A_log = precise.empty(self._share.size)
        self.dt_bias = precise.empty(self._share.size, width)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Load this rank's heads of all. Kimi-K3's `A_log` has zeros behind its last head.

        Raises:
            ValueError: when the tensor has not just so many numbers.
        """
        target: torch.Tensor = getattr(self, name)
        share = self._share
        wanted = share.total * (target.numel() // share.size)
        if name == "A_log" and tensor.numel() > wanted:
            rest = tensor.flatten()[wanted:]
            if rest.is_meta or not rest.any():
                tensor = tensor.flatten()[:wanted]
        if tensor.numel() != wanted:
            raise ValueError(
                f"the checkpoint holds shape {list(tensor.shape)}, the model wants {wanted} numbers"
            )
        by_head = tensor.reshape(share.total, *target.shape[1:])
        copy_weight(target, by_head[share.start : share.start + share.size])


class GatedRMSNorm(nn.Module):
    """The norm of each head, times its gate.

    Args:
        activation: of the gate, `silu` or `sigmoid`.
    """

    def __init__(self, size: int, eps: float, activation: str, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(size)
        self._eps, self._activation = eps, activation
        self._norm = context.ops.resolve("gated_rms_norm", context.dtype, size=size)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Both [T, heads, size] -> the same shape."""
        out: torch.Tensor = self._norm(x, gate, self.weight, self._eps, self._activation)
        return out


class DeltaRule(RecurrentLayer):
    """Convolves queries, keys and values, then goes on from each sequence's state.

    Args:
        num_key_heads, num_heads: of this rank: of queries and keys, and of values.
        taps: of the convolution.
        lower_bound: of log decays, where they are a sigmoid of their input; None for the usual
            softplus.
    """

    def __init__(
        self,
        num_key_heads: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        taps: int,
        context: LayerContext,
        lower_bound: float | None = None,
    ) -> None:
        super().__init__()
        self.num_key_heads, self.num_heads = num_key_heads, num_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.taps = taps
        self._dtype, self._state_dtype = context.dtype, context.state_dtype
        self._lower_bound = lower_bound
        heads = {"num_key_heads": num_key_heads, "num_heads": num_heads}
        sizes = {**heads, "key_dim": key_dim, "value_dim": value_dim}
        self._conv = context.ops.resolve("causal_conv", context.dtype, taps=taps)
        self._gates = context.ops.resolve("delta_gates", context.dtype, **sizes)
        self._rule = context.ops.resolve("delta_rule", context.dtype, **sizes)
        self._widths = [num_key_heads * key_dim] * 2 + [num_heads * value_dim]

    def state_parts(self) -> Mapping[str, StatePart]:
        matrix = self.num_heads, self.key_dim, self.value_dim
        return {
            "inputs": StatePart((sum(self._widths),), self._dtype, reach=self.taps - 1),
            "state": StatePart(matrix, self._state_dtype),
        }

    def bind_states(self, parts: Mapping[str, torch.Tensor]) -> None:
        self._inputs, self._states = parts["inputs"], parts["state"]

    def forward(
        self,
        qkv: torch.Tensor,
        conv: ShortConv,
        decay: torch.Tensor,
        beta: torch.Tensor,
        gates: DeltaGates,
        metadata: StateMetadata,
    ) -> torch.Tensor:
        """qkv [T, C], decay [T, heads, n] and beta [T, heads], all raw -> [T, heads, value_dim]."""
        tokens = len(qkv)
        mixed = self._conv(qkv, conv.weight, self._inputs, metadata)
        q, k, v = torch.split_with_sizes(mixed, self._widths, 1)
        by_key = tokens, self.num_key_heads, self.key_dim
        log_decay, strength = self._gates(
            decay, beta, gates.A_log, gates.dt_bias, self._lower_bound
        )
        out: torch.Tensor = self._rule(
            q.view(by_key),
            k.view(by_key),
            v.view(tokens, self.num_heads, self.value_dim),
            log_decay,
            strength,
            self._states,
            metadata,
        )
        return out
