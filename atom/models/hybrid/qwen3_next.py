"""Qwen3-Next: three layers with Gated DeltaNet for each with attention, and gates everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from atom.config import ConfigError
from atom.model_ops.attention.delta_rule import DeltaGates, DeltaRule, GatedRMSNorm, ShortConv
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer
from atom.model_ops.linear import ColumnParallelLinear, RowParallelLinear, share_of
from atom.model_ops.quant.rounding import Rows, unrounded
from atom.model_ops.rotary import AttentionInputs, RotaryEmbedding
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.gated_attention import GatedAttention
from atom.models.layers.layer_types import is_linear
from atom.models.layers.mtp import MTPTarget
from atom.models.layers.one_plus_norms import OnePlusNorms
from atom.models.llama import SILU, head_size
from atom.models.moe.deepseek_v2 import expect
from atom.models.moe.qwen2_moe import Qwen2MoeDecoderLayer
from atom.models.phi3 import rotated_size

# A layer's first half has one name here, and what its decays depend on is a module.
_MODULES = {
    "linear_attn": "self_attn",
    "A_log": "gates.A_log",
    "dt_bias": "gates.dt_bias",
}
# The checkpoint's names of the prediction layer, behind `mtp`, and what follows our layer's.
_PREDICTION = {
    "layers.0": "",
    "fc": ".eh_proj",
    "pre_fc_norm_embedding": ".enorm",
    "pre_fc_norm_hidden": ".hnorm",
    "norm": ".shared_head.norm",
}


class GatedDeltaNet(Sublayer):
    """Linear attention, a norm of each head and its gate; its output is a sum over the ranks.

    Source: transformers' `qwen3_next`. Ranks split it by heads of keys.
    """

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str) -> None:
        super().__init__()
        expect(config, "hidden_act", *SILU)
        key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
        if heads % key_heads:
            raise ConfigError(
                f"linear_num_value_heads={heads} is no multiple of linear_num_key_heads={key_heads}"
            )
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        group = context.group
        self.num_key_heads = group.divide(key_heads, "linear_num_key_heads")
        self.repeats = heads // key_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.keys, self.values = key_heads * key_dim, heads * value_dim
        taps = config.linear_conv_kernel_dim
        keys = share_of(group, self.keys, "linear_num_key_heads")
        values = share_of(group, self.values, "linear_num_value_heads")
        self.create_projections(config.hidden_size, context, prefix)
        self.conv1d = ShortConv({"q": keys, "k": keys, "v": values}, taps, context)
        self.gates = DeltaGates(heads, 1, context)
        self.attn = DeltaRule(
            self.num_key_heads,
            self.num_key_heads * self.repeats,
            key_dim,
            value_dim,
            taps,
            context,
        )
        self.norm = GatedRMSNorm(value_dim, config.rms_norm_eps, "silu", context)
        self.out_proj = RowParallelLinear(
            self.values, config.hidden_size, False, context, f"{prefix}.out_proj"
        )

    def create_projections(self, hidden_size: int, context: LayerContext, prefix: str) -> None:
        """Those of the input; each head of keys has its rows of all of them beside each other."""
        rows = 2 * (self.keys + self.values)
        self.in_proj_qkvz = ColumnParallelLinear(
            hidden_size, rows, False, context, f"{prefix}.in_proj_qkvz"
        )
        heads = self.values // self.value_dim
        self.in_proj_ba = ColumnParallelLinear(
            hidden_size, 2 * heads, False, context, f"{prefix}.in_proj_ba"
        )

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, hidden] -> queries, keys and values [T, C], gates [T, heads, value_dim], decays and
        betas [T, heads].
        """
        tokens, heads = len(x), self.num_key_heads
        width = self.repeats * self.value_dim
        rows = self.in_proj_qkvz(x).view(tokens, heads, -1)
        *mixed, z = torch.split_with_sizes(rows, [self.key_dim, self.key_dim, width, width], 2)
        b, a = torch.split_with_sizes(
            self.in_proj_ba(x).view(tokens, heads, -1), [self.repeats] * 2, 2
        )
        qkv = torch.cat([part.reshape(tokens, -1) for part in mixed], dim=-1)
        gate = z.reshape(tokens, -1, self.value_dim)
        return qkv, gate, a.reshape(tokens, -1), b.reshape(tokens, -1)

    def forward(self, x: Rows, inputs: AttentionInputs) -> torch.Tensor:
        qkv, gate, decay, beta = self.project(unrounded(x))
        states = inputs.metadata.states
        attended = self.attn(qkv, self.conv1d, decay[..., None], beta, self.gates, states)
        normed = self.norm(attended, gate)
        out: torch.Tensor = self.out_proj(normed.view(len(qkv), -1))
        return out


class Qwen3NextDecoderLayer(Qwen2MoeDecoderLayer):
    """Its first half is what `layer_types` says."""

    attention_class: ClassVar[type[Sublayer]] = GatedAttention
    linear_class: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet

    def create_attention(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        if layer_id < config.num_hidden_layers and is_linear(config, layer_id):
            return self.linear_class(config, context, f"{prefix}.linear_attn")
        return super().create_attention(config, layer_id, context, prefix)


class Qwen3NextForCausalLM(OnePlusNorms, MTPTarget):
    """Source of names and computation: transformers' `qwen3_next`.

    It does not have the prediction layer, `mtp.*`: one with attention, whatever the last is. Source
    of its computation: Qwen3-Next's checkpoint and what engines make of it, DeepSeek-V3's layer by
    other names.
    """

    layer_class = Qwen3NextDecoderLayer

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        size = head_size(config)
        return RotaryEmbedding(config, size, context, rotary_dim=rotated_size(config))

    @property
    def mtp_layer_ids(self) -> range:
        count = getattr(self.config, "mtp_num_hidden_layers", 1)  # not in every config
        return range(self.config.num_hidden_layers, self.config.num_hidden_layers + count)

    @property
    def mtp_renames(self) -> tuple[tuple[str, str], ...]:
        layer = f"model.layers.{self.config.num_hidden_layers}"
        return tuple((f"mtp.{name}.", f"{layer}{ours}.") for name, ours in _PREDICTION.items())

    def mtp_prefix(self, layer_id: int) -> str:
        """Raises:
        ConfigError: for several layers: no published model says how they share a projection.
        """
        if (count := len(self.mtp_layer_ids)) > 1:
            raise ConfigError(
                f"method mtp: {self.config.model_type} with mtp_num_hidden_layers={count} is not "
                f"supported, one is"
            )
        return f"mtp.layers.{layer_id - self.config.num_hidden_layers}"

    @property
    def weight_mapping(self) -> WeightMapping:
        mapping = super().weight_mapping
        return replace(mapping, modules=_MODULES, ignored=(*mapping.ignored, r"mtp\..*"))
