"""Kimi-Linear: three layers with Kimi Delta Attention for each with MLA, none of which rotates."""

from __future__ import annotations

from dataclasses import replace

import torch

from atom.config import ConfigError
from atom.model_ops.attention.delta_rule import DeltaGates, DeltaRule, GatedRMSNorm, ShortConv
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer
from atom.model_ops.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    share_of,
)
from atom.model_ops.quant.rounding import Rows, unrounded
from atom.model_ops.rotary import AttentionInputs, NoRotation, RotaryEmbedding
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.layer_types import is_linear
from atom.models.llama import SILU
from atom.models.moe.deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2ForCausalLM,
    TypedDecoderLayer,
    expect,
)
from atom.models.moe.mixtral import EXPERT_MODULES

# In the files, and as transformers has it: it puts what decays depend on in a module of its own.
_MODULES = {
    **EXPERT_MODULES,
    "forget_gate": "",
    "A_log": "gates.A_log",
    "dt_bias": "gates.dt_bias",
}
_CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
# Of Kimi-K3, whose layers compute something else.
_UNSUPPORTED = (
    *("mla_use_output_gate", "attn_res_block_size", "gate_lower_bound", "use_full_rank_gate"),
    *("moe_latent_size", "routed_expert_hidden_size"),
)


class KimiDeltaAttention(Sublayer):
    """Linear attention with a decay for each channel; its output is a sum over the ranks.

    Source: transformers' `kimi_linear`, arXiv 2510.26692. Ranks split it by heads.
    """

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str) -> None:
        super().__init__()
        hidden, heads, size = config.hidden_size, config.linear_num_heads, config.linear_head_dim
        taps, width = config.linear_conv_kernel_dim, heads * size
        self.head_dim = size
        self.num_heads = context.group.divide(heads, "linear_attn_config num_heads")
        self.qkv_proj = MergedColumnParallelLinear(
            hidden,
            {"q_proj": width, "k_proj": width, "v_proj": width},
            False,
            context,
            f"{prefix}.qkv_proj",
        )
        share = share_of(context.group, width, "linear_attn_config num_heads")
        self.conv1d = ShortConv(dict.fromkeys(_CONVOLUTIONS, share), taps, context)
        self.f_a_proj = ReplicatedLinear(hidden, size, False, context, f"{prefix}.f_a_proj")
        self.f_b_proj = ColumnParallelLinear(size, width, False, context, f"{prefix}.f_b_proj")
        lower_bound = self._create_gates(config, width, context, prefix)
        self.b_proj = ColumnParallelLinear(hidden, heads, False, context, f"{prefix}.b_proj")
        self.gates = DeltaGates(heads, size, context)
        self.attn = DeltaRule(
            self.num_heads, self.num_heads, size, size, taps, context, lower_bound
        )
        self.o_norm = GatedRMSNorm(size, config.rms_norm_eps, "sigmoid", context)
        self.o_proj = RowParallelLinear(width, hidden, False, context, f"{prefix}.o_proj")

    def _create_gates(
        self, config: PretrainedConfig, width: int, context: LayerContext, prefix: str
    ) -> float | None:
        """Create what `_output_gate` needs -> the lower bound of log decays, if there is one."""
        size = config.linear_head_dim
        self.g_a_proj = ReplicatedLinear(
            config.hidden_size, size, False, context, f"{prefix}.g_a_proj"
        )
        self.g_b_proj = ColumnParallelLinear(size, width, False, context, f"{prefix}.g_b_proj")
        return None

    def _output_gate(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, width of this rank]."""
        gate: torch.Tensor = self.g_b_proj(self.g_a_proj(rows))
        return gate

    def forward(self, x: Rows, inputs: AttentionInputs) -> torch.Tensor:
        rows = unrounded(x)
        by_head = len(rows), self.num_heads, self.head_dim
        decay = self.f_b_proj(self.f_a_proj(rows)).view(by_head)
        gate = self._output_gate(rows).view(by_head)
        attended = self.attn(
            self.qkv_proj(rows),
            self.conv1d,
            decay,
            self.b_proj(rows),
            self.gates,
            inputs.metadata.states,
        )
        out: torch.Tensor = self.o_proj(self.o_norm(attended, gate).view(len(rows), -1))
        return out


class KimiLinearAttention(DeepseekV2Attention):
    @staticmethod
    def scale(config: PretrainedConfig) -> float:
        scale: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        return scale


class KimiLinearDecoderLayer(TypedDecoderLayer):
    """Its first half is what `layer_types` says."""

    attention_class = KimiLinearAttention

    def create_attention(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        if is_linear(config, layer_id):
            return KimiDeltaAttention(config, context, f"{prefix}.self_attn")
        return super().create_attention(config, layer_id, context, prefix)


class KimiLinearForCausalLM(DeepseekV2ForCausalLM):
    """Source of names and computation: transformers' `kimi_linear`."""

    layer_class = KimiLinearDecoderLayer

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str = "") -> None:
        expect(config, "moe_layer_freq", 1)
        expect(config, "moe_router_activation_func", "sigmoid")
        expect(config, "mla_use_nope", True)
        expect(config, "num_nextn_predict_layers", 0)
        self.check(config)
        super().__init__(config, context, prefix)

    def check(self, config: PretrainedConfig) -> None:
        """Raises:
        ConfigError: for what only Kimi-K3 computes.
        """
        expect(config, "hidden_act", *SILU)
        inner = getattr(config, "linear_attn_config", None) or {}
        for name in _UNSUPPORTED:
            value = getattr(config, name, None) or inner.get(name)
            if value:
                raise ConfigError(f"{config.model_type} with {name}={value!r} is not supported")

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        return NoRotation(config, config.qk_rope_head_dim, context)

    @property
    def weight_mapping(self) -> WeightMapping:
        mapping = super().weight_mapping
        packed = {**mapping.packed, "conv1d": _CONVOLUTIONS}
        return replace(mapping, modules=_MODULES, packed=packed)
