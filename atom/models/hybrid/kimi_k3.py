"""Kimi-K3's text model: Kimi-Linear with gates of full rank, experts in a latent space, and inputs
of layers that are mixed from those of blocks of layers.

Source of names and computation: the published configuration and names of tensors, Kimi-K3's report
(arXiv 2607.24653), and Attention Residuals (arXiv 2603.15031).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from atom.config import ConfigError
from atom.model_ops.attention.metadata import ModelInput, ModelOutput
from atom.model_ops.gates import SituGate
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import RMSNorm, Sublayer
from atom.model_ops.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
    share_of,
)
from atom.model_ops.moe import FusedMoE, TopKRouter
from atom.model_ops.quant.base import UnquantizedConfig
from atom.model_ops.quant.rounding import Rows, unrounded
from atom.model_ops.rank_sums import resolve_plain_sum
from atom.model_ops.rotary import AttentionInputs
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.hybrid.kimi_linear import (
    KimiDeltaAttention,
    KimiLinearAttention,
    KimiLinearDecoderLayer,
    KimiLinearForCausalLM,
)
from atom.models.layers.layer_types import is_linear
from atom.models.llama import Activation, LlamaMLP, LlamaModel
from atom.models.moe.deepseek_v2 import DeepseekV3MoE, expect

logger = logging.getLogger(__name__)

_TEXT = "language_model."
_VISION = (r"vision_tower\..*", r"mm_projector\..*")
# In the files two modules beside the sublayer.
_MIXTURES = ("self_attention_res", "mlp_res", "output_attn_res")
_MODULES = {f"{name}_{part}": f"{name}.{part}" for name in _MIXTURES for part in ("norm", "proj")}
# Keys of `linear_attn_config`; others may change what is computed.
_LINEAR_KEYS = {
    *("full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size"),
    *("gate_lower_bound", "use_full_rank_gate"),
}
# What the op that mixes residuals takes, the running one included.
_MOST_SOURCES = 64


class KimiK3DeltaAttention(KimiDeltaAttention):
    """With decays that have a lower bound, and a gate of full rank on the output."""

    def _create_gates(
        self, config: PretrainedConfig, width: int, context: LayerContext, prefix: str
    ) -> float | None:
        self.g_proj = ColumnParallelLinear(
            config.hidden_size, width, False, context, f"{prefix}.g_proj"
        )
        bound: float = config.linear_attn_config["gate_lower_bound"]
        return bound

    def _output_gate(self, rows: torch.Tensor) -> torch.Tensor:
        gate: torch.Tensor = self.g_proj(rows)
        return gate


class KimiK3Attention(KimiLinearAttention):
    """Its output is multiplied by the sigmoid of a gate of its input."""

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(config, layer_id, context, prefix)
        width = config.num_attention_heads * config.v_head_dim
        self.g_proj = ColumnParallelLinear(
            config.hidden_size, width, False, context, f"{prefix}.g_proj"
        )
        self._mul_sigmoid = context.ops.resolve("mul_sigmoid", context.dtype)

    @property
    def reader(self) -> LinearBase | None:
        return None  # the gate is another one

    def forward(self, x: Rows, inputs: AttentionInputs) -> torch.Tensor:
        rows = self._project(x)
        attended = self.attn(*rows, self.kv_b_proj.by_head(), inputs)
        out: torch.Tensor = self.o_proj(self._mul_sigmoid(attended, self.g_proj(x)))
        return out


class KimiK3MLP(LlamaMLP):
    def resolve_activation(self, config: PretrainedConfig, context: LayerContext) -> Activation:
        gate = situ_gate(config)
        op = context.ops.resolve("situ_and_mul", context.dtype, size=self.down_proj.in_features)
        return partial(op, beta=gate.beta, linear_beta=gate.linear_beta)


class KimiK3MoE(Sublayer):
    """Experts whose inputs and outputs are in a latent space, beside a shared MLP; a sum over the
    ranks.

    The router sees the rows as they are. The sum of a token's experts is whole on every rank before
    its norm; of the projection back each rank computes its columns.
    """

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str) -> None:
        super().__init__()
        routing = DeepseekV3MoE.routing(config)
        size, latent = config.hidden_size, config.routed_expert_hidden_size
        # Of the quantisation's names, too, but the published ones are not quantised.
        plain = replace(context, quant=UnquantizedConfig())
        self.gate = TopKRouter(size, routing, True, context)
        self.routed_expert_down_proj = ReplicatedLinear(
            size, latent, False, plain, f"{prefix}.routed_expert_down_proj"
        )
        self.experts = FusedMoE(
            config.n_routed_experts,
            routing.visits,
            latent,
            config.moe_intermediate_size,
            context,
            f"{prefix}.experts",
            gate=situ_gate(config),
        )
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, context)
        self.routed_expert_up_proj = RowParallelLinear(
            latent, size, False, plain, f"{prefix}.routed_expert_up_proj"
        )
        self._share = share_of(context.group, latent, "routed_expert_hidden_size")
        self.shared_experts = KimiK3MLP(
            config,
            config.moe_intermediate_size * config.n_shared_experts,
            context,
            f"{prefix}.shared_experts",
        )
        self._group = context.group
        self._sum = resolve_plain_sum(latent, context)
        self._add = context.ops.resolve("add", context.dtype)

    def forward(self, x: Rows) -> torch.Tensor:
        rows = unrounded(x)
        routed = self.experts(self.routed_expert_down_proj(rows), *self.gate(rows))
        if self._sum is not None:
            routed = self._sum(routed, self._group)
        begin = self._share.start
        own = self.routed_expert_norm(routed)[:, begin : begin + self._share.size]
        out: torch.Tensor = self._add(self.shared_experts(x), self.routed_expert_up_proj(own))
        return out


class ResidualMix(nn.Module):
    """The input of a sublayer: a mixture of the sums of blocks of layers and of the running sum."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.norm, self.proj = nn.Module(), nn.Module()
        self.norm.weight = context.empty(size)
        self.proj.weight = context.empty(1, size)
        self._weights = self.norm.weight, self.proj.weight
        self._eps = eps
        self._mix = context.ops.resolve("mix_residuals", context.dtype, size=size)

    def forward(self, closed: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
        """Blocks [n, T, hidden] and the running sum [T, hidden] -> [T, hidden]."""
        out: torch.Tensor = self._mix(closed, running, *self._weights, self._eps)
        return out


class KimiK3DecoderLayer(KimiLinearDecoderLayer):
    """Attention and MLP read mixtures of residuals, normed as usual."""

    attention_class = KimiK3Attention

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(config, layer_id, context, prefix)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attention_res = ResidualMix(size, eps, context)
        self.mlp_res = ResidualMix(size, eps, context)
        self._closes_block = layer_id % config.attn_res_block_size == 0
        self._group = context.group
        self._sum = resolve_plain_sum(size, context)
        self._add = context.ops.resolve("add", context.dtype)

    def create_attention(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        if is_linear(config, layer_id):
            return KimiK3DeltaAttention(config, context, f"{prefix}.self_attn")
        return super().create_attention(config, layer_id, context, prefix)

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        if self.is_dense(config, layer_id):
            return KimiK3MLP(config, config.intermediate_size, context, prefix)
        return KimiK3MoE(config, context, prefix)

    def add_to(
        self,
        running: torch.Tensor,
        blocks: BlockSums,
        inputs: AttentionInputs,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """The running sum [T, hidden] before the layer -> after it, of `rows` [R] or of all; both
        the same on all ranks. It ends in `blocks` where the layer begins another.
        """
        x = running
        if blocks.count:
            x = self.self_attention_res(blocks.closed, running)
        attended = self._whole(self.self_attn(self.input_layernorm(x), inputs))
        if rows is not None:
            attended, running = attended[rows], running[rows]
            blocks.keep(rows)
        if self._closes_block:
            blocks.close(running)
            running = attended
        else:
            running = self._add(attended, running)
        x = self.post_attention_layernorm(self.mlp_res(blocks.closed, running))
        out: torch.Tensor = self._add(self._whole(self.mlp(x)), running)
        return out

    def _whole(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, in memory that may be written to."""
        return partial if self._sum is None else self._sum(partial, self._group)


class BlockSums:
    """The sums of the blocks of layers that a pass has behind it, the embedding first.

    Attributes:
        count: of them.
    """

    def __init__(self, like: torch.Tensor, most: int) -> None:
        self._sums = like.new_empty(most, *like.shape)
        self.count = 0

    @property
    def closed(self) -> torch.Tensor:
        """[count, T, hidden]."""
        return self._sums[: self.count]

    def close(self, running: torch.Tensor) -> None:
        """Add the running sum [T, hidden]."""
        self._sums[self.count].copy_(running)
        self.count += 1

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with some of the rows."""
        self._sums = self._sums[:, rows]


class KimiK3Model(LlamaModel):
    """Attributes:
    output_attn_res: what the final norm reads.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        context: LayerContext,
        *args: Any,
    ) -> None:
        super().__init__(config, context, *args)
        self.output_attn_res = ResidualMix(config.hidden_size, config.rms_norm_eps, context)
        block = config.attn_res_block_size
        self._most_blocks = (config.num_hidden_layers + block - 1) // block
        if self._most_blocks >= _MOST_SOURCES:
            raise ConfigError(
                f"{config.model_type} with attn_res_block_size={block} and "
                f"{config.num_hidden_layers} layers is not supported; at most "
                f"{_MOST_SOURCES - 1} blocks are"
            )

    def forward(self, model_input: ModelInput) -> ModelOutput:
        running = self.embed_tokens(model_input.input_ids)
        blocks = BlockSums(running, self._most_blocks)
        boundaries = {}
        last = len(self._layers) - 1
        rows = None if last + 1 in self.aux_layer_ids else model_input.output_rows
        by_rotary = [rotary.of_step(model_input) for rotary in self._rotaries]
        for i, layer in enumerate(self._layers):
            if i in self.aux_layer_ids:
                boundaries[i] = running
            assert isinstance(layer, KimiK3DecoderLayer)
            inputs = by_rotary[self._rotary_of_layer[i]]
            running = layer.add_to(running, blocks, inputs, rows if i == last else None)
        boundaries[last + 1] = running
        hidden = self.norm(self.output_attn_res(blocks.closed, running))
        return ModelOutput(hidden, tuple(boundaries[i] for i in self.aux_layer_ids), rows)


class KimiK3ForConditionalGeneration(KimiLinearForCausalLM):
    """The checkpoint's `language_model.*`; vision weights are not loaded.

    Auxiliary hidden states are the running sums between layers, which drafts were trained on.
    """

    layer_class = KimiK3DecoderLayer
    model_class = KimiK3Model
    needed: ClassVar[tuple[str, ...]] = (
        *KimiLinearForCausalLM.needed,
        *("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size"),
    )

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__(config.get_text_config(), context, _TEXT)
        if context.device.type != "meta":  # not when it is only sketched
            logger.info("%s runs as a text model: vision weights are skipped", config.model_type)

    def check(self, config: PretrainedConfig) -> None:
        expect(config, "mla_use_output_gate", True)
        expect(config, "latent_moe_use_norm", True)
        expect(config, "hidden_act", "situ")
        given = config.linear_attn_config or {}
        if given.get("use_full_rank_gate") is not True or "gate_lower_bound" not in given:
            raise ConfigError(
                f"kimi_k3 with linear_attn_config={given!r} is not supported; it should have "
                f"use_full_rank_gate true, and gate_lower_bound"
            )
        if others := sorted(given.keys() - _LINEAR_KEYS):
            told = ", ".join(f"{name}={given[name]!r}" for name in others)
            raise ConfigError(f"kimi_k3 with {told} in linear_attn_config is not supported")

    @property
    def weight_mapping(self) -> WeightMapping:
        mapping = super().weight_mapping
        head = (rf"{_TEXT}lm_head\.weight",) if self.tied else ()
        return replace(
            mapping,
            renames=((_TEXT, ""), *mapping.renames),
            ignored=(*mapping.ignored, *head, *_VISION),
            modules={**mapping.modules, **_MODULES},
        )


def situ_gate(config: PretrainedConfig) -> SituGate:
    """The activation of MLPs and experts.

    Raises:
        ConfigError: when the configuration does not name both betas.
    """
    names = "activation_situ_beta", "activation_situ_linear_beta"
    beta, linear = (getattr(config, name, None) for name in names)
    if not beta or not linear:
        raise ConfigError(
            f"kimi_k3 with activation_situ_beta={beta!r} and activation_situ_linear_beta="
            f"{linear!r} is not supported; both should be positive numbers"
        )
    return SituGate(float(beta), float(linear))
