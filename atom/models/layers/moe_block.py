"""A layer's mixture of experts without groups and shared experts: scores, top k."""

from __future__ import annotations

from typing import ClassVar

import torch

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer
from atom.model_ops.moe import FusedMoE, TopKRouter
from atom.model_ops.quant.rounding import Rows, unrounded
from atom.model_ops.rank_sums import SumInput
from atom.model_ops.routing import Routing
from atom.models.config.model_config import PretrainedConfig
from atom.models.llama import SILU


class SoftmaxMoE(Sublayer):
    """Routed experts, whose softmax scores are renormalised if asked; a sum over the ranks."""

    scoring: ClassVar[str] = "softmax"
    has_correction_bias: ClassVar[bool] = False
    turned: ClassVar[bool] = False  # as of `FusedMoE`

    def __init__(
        self,
        config: PretrainedConfig,
        num_experts: int,
        intermediate_size: int,
        renormalize: bool,
        context: LayerContext,
        prefix: str,
    ) -> None:
        super().__init__()
        if config.hidden_act not in SILU:
            raise ConfigError(f"hidden_act={config.hidden_act!r} is not supported; only silu is")
        routing = Routing(
            num_experts=num_experts,
            top_k=config.num_experts_per_tok,
            scoring=self.scoring,
            renormalize=renormalize,
        )
        self.gate = TopKRouter(config.hidden_size, routing, self.has_correction_bias, context)
        self.experts = FusedMoE(
            num_experts,
            routing.visits,
            config.hidden_size,
            intermediate_size,
            context,
            f"{prefix}.experts",
            turned=self.turned,
        )
        self._sum_input = SumInput(config.hidden_size, context)

    @property
    def reader(self) -> FusedMoE:
        return self.experts

    def forward(self, x: Rows) -> torch.Tensor:
        rows = unrounded(x)
        out: torch.Tensor = self.experts(x, *self.gate(rows), self._sum_input.rows(len(rows)))
        return out


class SigmoidMoE(SoftmaxMoE):
    """With sigmoid scores, and a correction bias that affects the choice of experts, not their
    weights.
    """

    scoring = "sigmoid"
    has_correction_bias = True
