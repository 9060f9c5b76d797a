"""Mixture of experts: the router, and the experts' weights in two tensors."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import nn

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.routing import Routing
from atom.model_ops.weights import copy_weight

# The checkpoint's module or tensor -> our parameter.
_PARAMETERS = {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2"}
_STACKED = {"gate_up_proj": "w13", "down_proj": "w2"}


class TopKRouter(nn.Module):
    """Chooses each token's experts; computes in float32."""

    def __init__(
        self, hidden_size: int, routing: Routing, has_correction_bias: bool, context: LayerContext
    ) -> None:
        super().__init__()
        precise = replace(context, dtype=torch.float32)
        self.routing = routing
        self.weight = precise.empty(routing.num_experts, hidden_size)
        self.e_score_correction_bias = (
            precise.empty(routing.num_experts) if has_correction_bias else None
        )
        self._linear = context.ops.resolve(
            "linear", torch.float32, in_features=hidden_size, out_features=routing.num_experts
        )
        self._route = context.ops.resolve(
            "moe_route",
            torch.float32,
            num_experts=routing.num_experts,
            top_k=routing.top_k,
            num_groups=routing.num_groups,
            softmax=routing.scoring == "softmax",
            pair_scores=routing.group_score == "top2_sum",
            has_bias=has_correction_bias,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] -> weights [T, k] float32, expert ids [T, k] int64."""
        logits = self._linear(x.float(), self.weight, None)
        out: tuple[torch.Tensor, torch.Tensor] = self._route(
            logits, self.e_score_correction_bias, self.routing
        )
        return out


class FusedMoE(nn.Module):
    """The gated MLPs of all experts; the intermediate dimension is split over the ranks.

    Attributes:
        w13: [experts, 2 * inter, hidden], gate above up projection.
        w2: [experts, hidden, inter], down projection.
    """

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, context: LayerContext
    ) -> None:
        super().__init__()
        self.group = context.group
        self.num_experts = num_experts
        self.rows = context.group.divide(intermediate_size, "moe_intermediate_size")
        self.w13 = context.empty(num_experts, 2 * self.rows, hidden_size)
        self.w2 = context.empty(num_experts, hidden_size, self.rows)
        self._experts = context.ops.resolve(
            "moe_experts",
            context.dtype,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=self.rows,
        )

    def place_weight(self, name: str) -> tuple[str, str | None] | None:
        """`3.gate_proj.weight` is one expert's matrix, `gate_up_proj` those of all experts."""
        if name in _STACKED:
            return _STACKED[name], None
        match = re.fullmatch(r"((\d+)\.(\w+))\.weight", name)
        if match is None or match[3] not in _PARAMETERS or int(match[2]) >= self.num_experts:
            return None
        return _PARAMETERS[match[3]], match[1]

    def weight_shards(self, name: str) -> tuple[str, ...]:
        """`0.gate_proj`, `0.up_proj`, `1.gate_proj`, ..."""
        parts = [part for part, parameter in _PARAMETERS.items() if parameter == name]
        return tuple(f"{i}.{part}" for i in range(self.num_experts) for part in parts)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Load one expert's matrix, or, without a shard, those of all experts, [experts, ...]."""
        if shard is not None:
            expert, _, part = shard.partition(".")
            copy_weight(self._part(part)[int(expert)], self._local(tensor, part))
        elif name == "w2":
            copy_weight(self.w2, self._local(tensor, "down_proj"))
        else:
            # Gate and up are split over the ranks separately.
            gate, up = tensor.chunk(2, dim=1)
            copy_weight(self._part("gate_proj"), self._local(gate, "gate_proj"))
            copy_weight(self._part("up_proj"), self._local(up, "up_proj"))

    def _part(self, part: str) -> torch.Tensor:
        """All experts' `part`, a view."""
        if part == "down_proj":
            return self.w2
        return self.w13[:, : self.rows] if part == "gate_proj" else self.w13[:, self.rows :]

    def _local(self, tensor: torch.Tensor, part: str) -> torch.Tensor:
        """This rank's share of one expert's or all experts' `part`."""
        return self.group.shard(tensor, tensor.dim() - (1 if part == "down_proj" else 2))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], weights and expert ids [T, k] -> this rank's partial sum [T, hidden]."""
        out: torch.Tensor = self._experts(x, self.w13, self.w2, weights, ids)
        return out
