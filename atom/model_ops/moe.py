"""Mixture of experts: the router, and the experts' weights in two tensors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from atom.model_ops.expert_parallel import HeldExperts, create_spread
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import share_of, stack
from atom.model_ops.quant.inputs import resolve_product, take_weights
from atom.model_ops.quant.storage import Cut, MatrixStorage, Part
from atom.model_ops.quant.weights import held_bytes
from atom.model_ops.routing import Routing

# The checkpoint's module or tensor -> our matrix.
_MATRICES = {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2"}
_EXPERT = re.compile(r"((\d+)\.(\w+))\.(\w+)")
_STACKED = {"gate_up_proj": "w13", "down_proj": "w2"}
_STACKED_TENSOR = re.compile(r"(gate_up_proj|down_proj)(?:_(\w+))?")


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
        """[T, hidden] -> weights [T, k] float32, expert ids [T, k] int64 or int32."""
        logits = self._linear(x.float(), self.weight, None)
        out: tuple[torch.Tensor, torch.Tensor] = self._route(
            logits, self.e_score_correction_bias, self.routing
        )
        return out


class FusedMoE(nn.Module):
    """The gated MLPs of all experts.

    The ranks of the layer's group split the intermediate dimension of every expert, unless those of
    `context.experts` hold whole ones.

    Attributes:
        num_experts: of all ranks.
        w13_weight: [experts, 2 * inter, hidden], gate above up projection, if not quantised.
        w2_weight: [experts, hidden, inter], down projection, if not quantised.

    Raises:
        ValueError: when there are fewer experts than ranks to hold them, or the intermediate size
            does not split.
    """

    w13_weight: nn.Parameter
    w2_weight: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        context: LayerContext,
        prefix: str,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self._dtype = context.dtype
        self._held = HeldExperts(num_experts, context.experts)
        self._spread = create_spread(self._held, context.experts, context.group)
        share = Cut.whole(intermediate_size)
        if context.experts.size == 1:
            share = share_of(context.group, intermediate_size, "moe_intermediate_size")
        self._parts = {
            **stack({"gate_proj": share, "up_proj": share}, hidden_size),
            "down_proj": Part(Cut.whole(hidden_size), share),
        }
        names = [f"{prefix}.{i}.{part}" for i in range(num_experts) for part in self._parts]
        method = context.quant.method_for(prefix, names, "experts")
        try:
            self._storages = {
                matrix: MatrixStorage(self, parts, method, context, f"{matrix}_", self._held.count)
                for matrix, parts in (
                    ("w13", [self._parts["gate_proj"], self._parts["up_proj"]]),
                    ("w2", [self._parts["down_proj"]]),
                )
            }
        except ValueError as error:
            raise ValueError(f"{prefix}: {error}") from error
        form = self._storages["w13"].format
        self.choice = resolve_product(
            "moe_experts",
            form,
            context,
            num_experts=self._held.count,
            hidden_size=hidden_size,
            intermediate_size=share.size,
        )
        self._experts = self.choice.function
        self._prepared: tuple[Any, Any] | None = None

    def place_weight(self, name: str) -> tuple[str, str | None] | None:
        """`3.gate_proj.weight` is one expert's tensor, `gate_up_proj` that of all experts, and
        `gate_up_proj_scales` their tensor `scales`.
        """
        if match := _STACKED_TENSOR.fullmatch(name):
            matrix, stored, shard = _STACKED[match[1]], match[2] or "weight", None
        elif match := _EXPERT.fullmatch(name):
            if match[3] not in _MATRICES or int(match[2]) >= self.num_experts:
                return None
            matrix, stored, shard = _MATRICES[match[3]], match[4], match[1]
        else:
            return None
        return (f"{matrix}_{stored}", shard) if stored in self._storages[matrix].stored else None

    def weight_shards(self, name: str) -> tuple[str, ...]:
        """`0.gate_proj`, `0.up_proj`, `1.gate_proj`, ..."""
        matrix = name.partition("_")[0]
        parts = [part for part, of in _MATRICES.items() if of == matrix]
        return tuple(f"{i}.{part}" for i in range(self.num_experts) for part in parts)

    @property
    def is_spread(self) -> bool:
        """Whether other ranks hold some of the experts."""
        return self._held.elsewhere > 0

    def holds(self, shard: str) -> bool:
        """Whether the shard's expert is one of this rank's."""
        return int(shard.partition(".")[0]) in self._held

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Load one expert's tensor, or, without a shard, those of all experts, [experts, ...]."""
        matrix, _, stored = name.partition("_")
        storage = self._storages[matrix]
        if shard is not None:
            expert, _, part = shard.partition(".")
            storage.load(stored, tensor, self._parts[part], int(expert) - self._held.first)
            return
        if self._held.elsewhere:
            tensor = self._of_held(tensor)
        if matrix == "w2":
            storage.load(stored, tensor, self._parts["down_proj"])
        else:
            # Gate and up are split over the ranks separately.
            alternate = storage.stored[stored].gate_up_alternate
            gate, up = (tensor[:, ::2], tensor[:, 1::2]) if alternate else tensor.chunk(2, dim=1)
            storage.load(stored, gate, self._parts["gate_proj"])
            storage.load(stored, up, self._parts["up_proj"])

    def _of_held(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's experts' part of a tensor [experts, ...]."""
        if not tensor.dim() or len(tensor) != self.num_experts:
            raise ValueError(
                f"the checkpoint holds shape {list(tensor.shape)}, the model wants one index for "
                f"each of {self.num_experts} experts in front"
            )
        return tensor.narrow(0, self._held.first, self._held.count)

    @property
    def dequantised_bytes(self) -> int:
        """Of what takes the place of quantised weights; 0 if they stay quantised."""
        if not self.choice.dequantises:
            return 0
        sizes = (sum(s.rows) * s.columns for s in self._storages.values())
        return self._held.count * sum(sizes) * self._dtype.itemsize

    @property
    def quantised_bytes(self) -> int:
        """Of weights that are no parameters but in the form that the op made of quantised ones."""
        return 0 if self._storages["w13"].format is None else held_bytes(self._prepared)

    def process_after_loading(self) -> None:
        """Convert quantised weights, and all to the layout that the op reads."""
        w13, w2 = self._storages.values()
        if w13.format is not None:
            self._prepared = take_weights(w13, self.choice), take_weights(w2, self.choice)
            if self.choice.prepare is not None:
                self._prepared = self.choice.prepare(*self._prepared, self._dtype)
        elif self.choice.prepare is not None:
            self._prepared = self.choice.prepare(self.w13_weight.data, self.w2_weight.data)
            self.w13_weight.data, self.w2_weight.data = self._prepared

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], weights and expert ids [T, k] -> this rank's partial sum [T, hidden]."""
        return self._spread(self._run, x, weights, ids)

    def _run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The same with ids among this rank's experts; their number for one elsewhere."""
        w13, w2 = self._prepared or (self.w13_weight, self.w2_weight)
        out: torch.Tensor = self._experts(x, w13, w2, weights, ids, self._held.elsewhere)
        return out
