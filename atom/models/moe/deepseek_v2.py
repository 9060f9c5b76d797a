"""DeepSeek-V2 and V3: MLA, and a mixture of experts after the first, dense layers.

Source of names and computation: transformers' `deepseek_v2` and `deepseek_v3`; papers: arXiv
2405.04434 and 2412.19437.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import ClassVar

import torch

from atom.config import ConfigError
from atom.model_ops.attention.mla import LatentUpProjection, MLAAttention
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import RMSNorm, RMSNormPair, Sublayer
from atom.model_ops.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedReplicatedLinear,
    ReplicatedLinear,
    RowParallelLinear,
    share_of,
)
from atom.model_ops.moe import FusedMoE, TopKRouter, expert_methods
from atom.model_ops.quant.base import are_alike
from atom.model_ops.quant.rounding import Rows, unrounded
from atom.model_ops.rank_sums import SumInput
from atom.model_ops.rotary import AttentionInputs, RotaryEmbedding
from atom.model_ops.routing import Routing
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.mtp import MTPTarget
from atom.models.llama import (
    SILU,
    LlamaDecoderLayer,
    LlamaMLP,
    has_mlp_bias,
)

# Where both are stored alike.
PACKED_ATTENTION = {"qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}


class DeepseekV2Attention(Sublayer):
    """MLA; the query projection is direct or low-rank. Its output is a sum over the ranks.

    Attributes:
        is_merged: whether the projections to low-rank queries and latents are one product.
    """

    mla_class: ClassVar[type[MLAAttention]] = MLAAttention
    q_proj: ColumnParallelLinear
    q_a_proj: ReplicatedLinear
    kv_a_proj_with_mqa: ReplicatedLinear

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__()
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.rank: int = config.kv_lora_rank
        self.has_low_rank_queries = config.q_lora_rank is not None
        self.kv_a_layernorm = RMSNorm(self.rank, self.latent_eps(config), context)
        self._create_projections(config, context, prefix)
        self.kv_b_proj = LatentUpProjection(
            config.num_attention_heads,
            self.rank,
            self.nope_dim + config.v_head_dim,
            context,
            f"{prefix}.kv_b_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.v_head_dim,
            config.hidden_size,
            config.attention_bias,
            context,
            f"{prefix}.o_proj",
        )
        self.attn = self.mla_class(
            self.kv_b_proj.num_heads,
            self.rank,
            self.rope_dim,
            config.v_head_dim,
            self.scale(config),
            context,
        )

    @staticmethod
    def scale(config: PretrainedConfig) -> float:
        """The factor on products of queries and keys."""
        return attention_scale(config)

    @staticmethod
    def latent_eps(config: PretrainedConfig) -> float:
        """For the norms between the low-rank projections, independent of rms_norm_eps."""
        return 1e-6

    @property
    def reader(self) -> LinearBase | None:
        return self.qkv_a_proj if self.is_merged else None

    @property
    def reader_of_queries(self) -> LinearBase | None:
        """The only one that reads the normed low-rank queries; None if there are several."""
        return self.q_b_proj

    @staticmethod
    def input_size(config: PretrainedConfig) -> int:
        """Size of the attention's input rows."""
        return int(config.hidden_size)

    def _create_projections(
        self, config: PretrainedConfig, context: LayerContext, prefix: str
    ) -> None:
        """Those of the input; of low-rank queries and of latents one, if they are stored alike."""
        size, bias = self.input_size(config), config.attention_bias
        rows = config.num_attention_heads * (self.nope_dim + self.rope_dim)
        downs = {"kv_a_proj_with_mqa": self.rank + self.rope_dim}
        if self.has_low_rank_queries:
            rank = config.q_lora_rank
            self.q_a_layernorm = RMSNorm(rank, self.latent_eps(config), context)
            self.q_b_proj = ColumnParallelLinear(rank, rows, False, context, f"{prefix}.q_b_proj")
            downs = {"q_a_proj": rank, **downs}
        else:
            self.q_proj = ColumnParallelLinear(size, rows, False, context, f"{prefix}.q_proj")
        self.is_merged = len(downs) > 1 and are_alike(
            *(context.quant.method_for(f"{prefix}.{name}") for name in downs)
        )
        if self.is_merged:
            self.qkv_a_proj = MergedReplicatedLinear(
                size, downs, bias, context, f"{prefix}.qkv_a_proj"
            )
            # Not a module: its weights are those of the two.
            self._norms = RMSNormPair(
                self.q_a_layernorm, self.kv_a_layernorm, self.reader_of_queries, context
            )
            return
        for name, count in downs.items():
            setattr(self, name, ReplicatedLinear(size, count, bias, context, f"{prefix}.{name}"))

    def _project(self, x: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, input_size] -> queries [T, heads, nope + rope], latents [T, rank], and the shared
        part of the keys [T, rope].
        """
        if self.has_low_rank_queries:
            low, latent, k_rope = self._project_down(x)
            return self._queries(low), latent, k_rope
        q = self.q_proj(x).view(x.shape[0], -1, self.nope_dim + self.rope_dim)
        return q, *self._latents(self.kv_a_proj_with_mqa(x))

    def _project_down(self, x: Rows) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        """The normed low-rank queries [T, q_lora_rank], and the rest as of `_project`."""
        if self.is_merged:
            down = self.qkv_a_proj(x)
            low, latent = self._norms(down)
            return low, latent, down[:, -self.rope_dim :]
        low = self.q_a_layernorm(self.q_a_proj(x))
        return low, *self._latents(self.kv_a_proj_with_mqa(x))

    def _queries(self, low: Rows) -> torch.Tensor:
        """Those of low-rank ones."""
        q: torch.Tensor = self.q_b_proj(low)
        return q.view(len(q), -1, self.nope_dim + self.rope_dim)

    def _latents(self, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed latents, and the rest, of [T, rank + rope]."""
        return self.kv_a_layernorm(down[:, : self.rank]), down[:, self.rank :]

    def forward(self, x: Rows, inputs: AttentionInputs) -> torch.Tensor:
        rows = self._project(x)
        attended = self.attn(*rows, self.kv_b_proj.by_head(), inputs)
        out: torch.Tensor = self.o_proj(attended)
        return out

    def write_kv(self, x: Rows, inputs: AttentionInputs) -> None:
        """Write the KV cache like `forward`, without computing its output."""
        name = "kv_a_proj_with_mqa"
        down = self.qkv_a_proj.multiply(x, name) if self.is_merged else self.kv_a_proj_with_mqa(x)
        self.attn.write(*self._latents(down), inputs)


class DeepseekV2MoE(Sublayer):
    """Routed experts, plus shared experts for every token; a sum over the ranks.

    Attributes:
        shared_experts: None if there are none, or the only one is among `experts`.
    """

    has_correction_bias: ClassVar[bool] = False

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str) -> None:
        super().__init__()
        expect(config, "hidden_act", *SILU)
        shared = f"{prefix}.shared_experts"
        joins = shared_expert_joins(config, context, prefix)
        routing = replace(self.routing(config), has_shared=joins)
        self.gate = TopKRouter(config.hidden_size, routing, self.has_correction_bias, context)
        self.experts = FusedMoE(
            config.n_routed_experts,
            routing.visits,
            config.hidden_size,
            config.moe_intermediate_size,
            context,
            f"{prefix}.experts",
            shared if joins else None,
        )
        self._sum_input = SumInput(config.hidden_size, context)
        self.shared_experts = None
        if config.n_shared_experts and not joins:
            self._add = context.ops.resolve("add", context.dtype)
            size = config.moe_intermediate_size * config.n_shared_experts
            self.shared_experts = LlamaMLP(
                config,
                size,
                context,
                shared,
                bias=has_mlp_bias(config),
            )

    @property
    def reader(self) -> FusedMoE:
        return self.experts

    @staticmethod
    def routing(config: PretrainedConfig) -> Routing:
        """Softmax scores; a group's score is that of its best expert."""
        expect(config, "scoring_func", "softmax")
        expect(config, "topk_method", "greedy", "group_limited_greedy")
        # transformers ignores this field and DeepSeek's code does not; no checkpoint sets it.
        expect(config, "norm_topk_prob", False)
        grouped = config.topk_method == "group_limited_greedy"
        return Routing(
            num_experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            scoring="softmax",
            num_groups=config.n_group if grouped else 1,
            top_groups=config.topk_group if grouped else 1,
            group_score="max",
            scaling=config.routed_scaling_factor,
        )

    def forward(self, x: Rows) -> torch.Tensor:
        rows = unrounded(x)
        out: torch.Tensor
        if self.shared_experts is None:
            out = self.experts(x, *self.gate(rows), self._sum_input.rows(len(rows)))
            return out
        routed = self.experts(x, *self.gate(rows))
        # In the memory of the first, which may be what the next sum over the ranks reads.
        out = self._add(self.shared_experts(rows), routed)
        return out


class DeepseekV3MoE(DeepseekV2MoE):
    """In V3 a correction bias affects the choice of experts, not their weights."""

    has_correction_bias = True

    @staticmethod
    def routing(config: PretrainedConfig) -> Routing:
        """Sigmoid scores; a group's score is the sum of its two best experts."""
        expect(config, "scoring_func", "sigmoid")
        expect(config, "topk_method", "noaux_tc")
        return Routing(
            num_experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            scoring="sigmoid",
            num_groups=config.n_group or 1,
            top_groups=config.topk_group or 1,
            group_score="top2_sum",
            renormalize=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
        )


class DeepseekV2DecoderLayer(LlamaDecoderLayer):
    """The first `first_k_dense_replace` layers are dense."""

    attention_class: ClassVar[type[Sublayer]] = DeepseekV2Attention
    moe_class: ClassVar[type[DeepseekV2MoE]] = DeepseekV2MoE

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        if self.is_dense(config, layer_id):
            return super().create_mlp(config, layer_id, context, prefix)
        return self.moe_class(config, context, prefix)

    @staticmethod
    def is_dense(config: PretrainedConfig, layer_id: int) -> bool:
        """Whether a layer has an MLP instead of experts."""
        expect(config, "moe_layer_freq", 1)
        dense: bool = layer_id < config.first_k_dense_replace
        return dense


class DeepseekV3DecoderLayer(DeepseekV2DecoderLayer):
    moe_class = DeepseekV3MoE


class TypedDecoderLayer(DeepseekV3DecoderLayer):
    """Layers are dense as `mlp_layer_types` says; those of prediction, which follow, are not."""

    @staticmethod
    def is_dense(config: PretrainedConfig, layer_id: int) -> bool:
        if layer_id >= config.num_hidden_layers:
            return False
        kind = config.mlp_layer_types[layer_id]
        if kind not in ("dense", "sparse"):
            raise ConfigError(
                f"mlp_layer_types says {kind!r} of layer {layer_id}; supported are dense and sparse"
            )
        return bool(kind == "dense")


class DeepseekV2ForCausalLM(MTPTarget):
    """Source of names and computation: transformers' `deepseek_v2`."""

    layer_class = DeepseekV2DecoderLayer
    needed: ClassVar[tuple[str, ...]] = (
        "v_head_dim",
        "num_experts_per_tok",
        "first_k_dense_replace",
    )

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        return RotaryEmbedding(config, config.qk_rope_head_dim, context, interleaved=True)

    @property
    def weight_mapping(self) -> WeightMapping:
        mapping = super().weight_mapping
        packed = {**mapping.packed, **PACKED_ATTENTION}
        ignored = mapping.ignored
        if not self.config.n_shared_experts:
            # transformers builds and saves an MLP of size 0 for them.
            ignored += (rf"{re.escape(self.prefix)}.*\.mlp\.shared_experts\..*",)
        adopted = {"shared_experts": "experts"}
        return replace(mapping, packed=packed, ignored=ignored, adopted=adopted)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Source of names and computation: transformers' `deepseek_v3`; also runs Kimi-K2."""

    layer_class = DeepseekV3DecoderLayer

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        interleaved = bool(config.rope_interleave)
        return RotaryEmbedding(config, config.qk_rope_head_dim, context, interleaved)


def attention_scale(config: PretrainedConfig) -> float:
    """The softmax scale, increased by `mscale_all_dim` of long-context scaling."""
    scale: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    mscale_all_dim = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not mscale_all_dim or rope["factor"] <= 1:
        return scale
    mscale: float = 0.1 * mscale_all_dim * math.log(rope["factor"]) + 1.0
    return scale * mscale * mscale


def shared_expert_joins(config: PretrainedConfig, context: LayerContext, prefix: str) -> bool:
    """Whether the shared expert is computed among the routed ones: on a GPU, where it saves four
    launches, if it is one of their size, and stored alike, or not quantised and the op of the
    others takes that. Ranks that hold whole experts have it apart.
    """
    if config.n_shared_experts != 1 or has_mlp_bias(config) or context.experts.size > 1:
        return False
    if not context.ops.platform.is_gpu:
        return False
    quant = context.quant
    parts = ("gate_proj", "up_proj", "down_proj")
    methods = expert_methods(quant, f"{prefix}.experts", [f"{prefix}.experts.0"])
    routed, down = methods.values()
    shared = [quant.method_for(f"{prefix}.shared_experts.{part}") for part in parts]
    if routed is None or any(shared) or not are_alike(routed, down):
        return are_alike(routed, down, *shared)
    size = share_of(context.group, config.moe_intermediate_size, "moe_intermediate_size").size
    choice = context.ops.consider(
        "quant_experts",
        context.dtype,
        routed.format,
        num_experts=config.n_routed_experts + 1,
        top_k=config.num_experts_per_tok + 1,
        elsewhere=0,
        hidden_size=config.hidden_size,
        intermediate_size=size,
    )
    return choice.takes_plain


def expect(config: PretrainedConfig, field: str, *supported: object) -> None:
    """Refuse a config with an unsupported value of `field`, if it has the field."""
    value = getattr(config, field, None)  # only some publishers write the field
    if value is not None and value not in supported:
        raise ConfigError(
            f"{config.model_type} with {field}={value!r} is not supported; supported: "
            f"{', '.join(repr(s) for s in supported)}"
        )
