"""Llama, the base of most dense models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import nn

from atom.config import ConfigError
from atom.model_ops.attention.metadata import ModelInput, ModelOutput
from atom.model_ops.attention.mha import Attention
from atom.model_ops.attention.sinks import HeadSinks
from atom.model_ops.embedding import (
    OutputHead,
    ParallelLMHead,
    TiedLMHead,
    VocabParallelEmbedding,
)
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import (
    ResidualLayerNorm,
    ResidualRMSNorm,
    RMSNorm,
    Sublayer,
)
from atom.model_ops.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from atom.model_ops.quant.rounding import Rows
from atom.model_ops.rotary import AttentionInputs, Rotary, RotaryEmbedding
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.base import CausalLM, check_aux_layer_ids, spread_aux_layer_ids
from atom.models.config.model_config import PretrainedConfig

Activation = Callable[[torch.Tensor], torch.Tensor]
Scale = Callable[[torch.Tensor, float], torch.Tensor]
SILU = ("silu", "swish")  # two names of one function
_WITH_MLP_BIAS = ("llama", "deepseek_v2", "smollm3", "granite")


class LlamaMLP(Sublayer):
    """`down(silu(gate(x)) * up(x))`, with gate and up as one product; a sum over the ranks."""

    def __init__(
        self,
        config: PretrainedConfig,
        intermediate_size: int,
        context: LayerContext,
        prefix: str,
        bias: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, sizes, bias, context, f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, config.hidden_size, bias, context, f"{prefix}.down_proj"
        )
        self._act = self.resolve_activation(config, context)

    def resolve_activation(self, config: PretrainedConfig, context: LayerContext) -> Activation:
        """The op from [T, gate and up] to [T, size].

        Raises:
            ConfigError: for an activation that the family does not have.
        """
        if config.hidden_act not in SILU:
            raise ConfigError(f"hidden_act={config.hidden_act!r} is not supported; only silu is")
        op: Activation
        op = context.ops.resolve("silu_and_mul", context.dtype, size=self.down_proj.in_features)
        return op

    @property
    def reader(self) -> LinearBase:
        return self.gate_up_proj

    def forward(self, x: Rows) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self._act(self.gate_up_proj(x)))
        return out


class LlamaAttention(Sublayer):
    """Rotary grouped-query attention; its output is a sum over the ranks.

    Attributes:
        has_output_gate: whether queries come with gates, which a subclass applies.
    """

    has_output_gate: ClassVar[bool] = False

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__()
        head_dim = head_size(config)
        self.qkv_proj = QKVParallelLinear(
            self.input_size(config),
            head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            self.has_qkv_bias(config),
            context,
            f"{prefix}.qkv_proj",
            self.has_output_gate,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * head_dim,
            config.hidden_size,
            self.has_output_bias(config),
            context,
            f"{prefix}.o_proj",
        )
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            head_dim,
            self.scale(config),
            context,
            self.sliding_window(config, layer_id),
            self.softcap(config),
            self.create_sinks(config, context),
        )

    @property
    def reader(self) -> LinearBase:
        return self.qkv_proj

    @staticmethod
    def input_size(config: PretrainedConfig) -> int:
        """Size of the attention's input rows."""
        return int(config.hidden_size)

    @staticmethod
    def has_qkv_bias(config: PretrainedConfig) -> bool:
        """Whether the projections to queries, keys and values have biases."""
        return bool(config.attention_bias)

    @staticmethod
    def has_output_bias(config: PretrainedConfig) -> bool:
        """Whether the projection of the output has one."""
        return bool(config.attention_bias)

    @staticmethod
    def scale(config: PretrainedConfig) -> float:
        """The factor on products of queries and keys."""
        scale: float = head_size(config) ** -0.5
        return scale

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        """The layer's window in tokens; None for full attention."""
        return None

    @staticmethod
    def softcap(config: PretrainedConfig) -> float | None:
        """The cap of scores; None for none."""
        return None

    @staticmethod
    def create_sinks(config: PretrainedConfig, context: LayerContext) -> HeadSinks | None:
        """Scores beside those of the keys; None for none."""
        return None

    def prepare_queries(self, q: torch.Tensor) -> torch.Tensor:
        """Transform queries before RoPE, in subclasses."""
        return q

    def prepare_keys(self, k: torch.Tensor) -> torch.Tensor:
        """The same of keys."""
        return k

    def forward(self, x: Rows, inputs: AttentionInputs) -> torch.Tensor:
        q, k, v = self.qkv_proj.split(self.qkv_proj(x))
        q, k = self.prepare_queries(q), self.prepare_keys(k)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v, inputs))
        return out

    def write_kv(self, x: Rows, inputs: AttentionInputs) -> None:
        """Write the KV cache like `forward`, without computing its output."""
        k, v = self.qkv_proj.keys_and_values(x)
        self.attn.write(self.prepare_keys(k), v, inputs)


class DecoderLayer(nn.Module):
    """Attention and MLP with pre-norms; the residual is passed separately.

    What attention and MLP return is this rank's part of a sum, which the next norm completes.
    """

    self_attn: Sublayer
    mlp: Sublayer
    input_layernorm: ResidualRMSNorm | ResidualLayerNorm
    post_attention_layernorm: ResidualRMSNorm | ResidualLayerNorm

    def enter(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor]:
        """From what the layer below returned, or the embedding and None: the attention's input, and
        the hidden state that enters the layer.
        """
        if residual is None:
            return self.input_layernorm(hidden), hidden
        return self.input_layernorm.feed(hidden, residual)

    def forward(
        self,
        x: Rows,
        residual: torch.Tensor,
        inputs: AttentionInputs,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From what `enter` returned: this rank's part of a sum, and the residual, whose sum is the
        layer's output, of `rows` [R] or of all.
        """
        attended = self.self_attn(x, inputs)
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        x, residual = self.post_attention_layernorm.feed(attended, residual)
        return self.mlp(x), residual


class LlamaDecoderLayer(DecoderLayer):
    """Layers that a configuration describes.

    Attributes:
        is_whole: whether the layer returns the sum itself instead, the same on all ranks.
    """

    attention_class: ClassVar[type[Sublayer]] = LlamaAttention
    is_whole: ClassVar[bool] = False

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = self.create_attention(config, layer_id, context, prefix)
        self.mlp = self.create_mlp(config, layer_id, context, f"{prefix}.mlp")
        self.input_layernorm, self.post_attention_layernorm = (
            ResidualRMSNorm(size, eps, context, sublayer.reader, self.is_whole)
            for sublayer in (self.self_attn, self.mlp)
        )

    def create_attention(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        """The layer's first half, [T, hidden] -> this rank's part of a sum [T, hidden].

        Args:
            prefix: of the layer.
        """
        return self.attention_class(config, layer_id, context, f"{prefix}.self_attn")

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        """The layer's second half, [T, hidden] -> this rank's part of a sum [T, hidden]."""
        return LlamaMLP(
            config, config.intermediate_size, context, prefix, bias=has_mlp_bias(config)
        )

    @classmethod
    def create_final_norm(
        cls, config: PretrainedConfig, context: LayerContext
    ) -> ResidualRMSNorm | ResidualLayerNorm:
        """The norm behind the last layer."""
        size, eps = config.hidden_size, config.rms_norm_eps
        return ResidualRMSNorm(size, eps, context, is_whole=cls.is_whole)


class Decoder(nn.Module):
    """Embedding, decoder layers and final norm.

    Attributes:
        aux_layer_ids: boundary ids of the hidden states that a forward pass returns.
    """

    embed_tokens: VocabParallelEmbedding
    norm: ResidualRMSNorm | ResidualLayerNorm
    aux_layer_ids: tuple[int, ...]
    _layers: tuple[DecoderLayer, ...]
    _rotaries: tuple[Rotary, ...]
    _rotary_of_layer: tuple[int, ...]
    _embedding_scale: float
    _scale: Scale | None

    def forward(self, model_input: ModelInput) -> ModelOutput:
        hidden = self.embed_tokens(model_input.input_ids)
        if self._scale is not None:
            hidden = self._scale(hidden, self._embedding_scale)
        images = model_input.images
        if images is not None:
            hidden = images.fill(hidden)
        where = model_input.positions, model_input.attention
        by_rotary = [AttentionInputs(*where, rotary) for rotary in self._rotaries]
        if model_input.mrope_shifts is not None:
            by_rotary = [rotary.of_step(model_input) for rotary in self._rotaries]
        residual: torch.Tensor | None = None
        boundaries: dict[int, torch.Tensor] = {}
        last = len(self._layers) - 1
        rows = model_input.output_rows
        if last + 1 in self.aux_layer_ids or (
            images is not None and images.num_deep(hidden.shape[1]) > last
        ):
            rows = None
        for i, layer in enumerate(self._layers):
            hidden, residual = layer.enter(hidden, residual)
            if i in self.aux_layer_ids:
                boundaries[i] = residual
            inputs = by_rotary[self._rotary_of_layer[i]]
            hidden, residual = layer(hidden, residual, inputs, rows if i == last else None)
            if images is not None:
                residual = images.deepen(i, residual)
        assert residual is not None
        hidden, boundaries[last + 1] = self.norm.add(hidden, residual)
        return ModelOutput(hidden, tuple(boundaries[i] for i in self.aux_layer_ids), rows)


class LlamaModel(Decoder):
    """A decoder that a configuration describes.

    Args:
        rotaries: that of each layer.
        embedding_scale: factor on the embedding's rows.

    Attributes:
        rotary: of the first layer, and of those that follow the last.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        context: LayerContext,
        layer_class: type[LlamaDecoderLayer],
        rotaries: Sequence[RotaryEmbedding],
        prefix: str,
        embedding_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, context, f"{prefix}.embed_tokens"
        )
        self._layers = tuple(
            layer_class(config, i, context, f"{prefix}.layers.{i}")
            for i in range(config.num_hidden_layers)
        )
        self.layers = nn.ModuleList(self._layers)
        self.norm = layer_class.create_final_norm(config, context)
        self.rotary = rotaries[0]
        distinct = tuple(dict.fromkeys(rotaries))
        self._rotaries = distinct
        self.rotaries = nn.ModuleList(distinct)
        self._rotary_of_layer = tuple(map(distinct.index, rotaries))
        self._embedding_scale = embedding_scale
        self._scale = None
        if embedding_scale != 1:
            self._scale = context.ops.resolve("scale", context.dtype)
        self.aux_layer_ids: tuple[int, ...] = ()


class LlamaForCausalLM(CausalLM):
    """Source of names and computation: transformers' `llama`."""

    layer_class: ClassVar[type[LlamaDecoderLayer]] = LlamaDecoderLayer
    model_class: ClassVar[type[LlamaModel]] = LlamaModel
    # Fields that some configurations leave null, for which there is no default.
    needed: ClassVar[tuple[str, ...]] = ("num_key_value_heads",)
    # The checkpoint's name of everything but the head, in names of quantised layers.
    trunk: ClassVar[str] = "model"

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str = "") -> None:
        super().__init__()
        if missing := [name for name in self.needed if getattr(config, name, 0) is None]:
            raise ConfigError(f"{config.model_type} without {', '.join(missing)}: give numbers")
        self.tied = bool(config.tie_word_embeddings)
        rotaries = self.create_rotaries(config, context)
        self.model = self.model_class(
            config,
            context,
            self.layer_class,
            rotaries,
            f"{prefix}{self.trunk}",
            self.embedding_scale(config, context),
        )
        self.lm_head: OutputHead
        if self.tied:
            self.lm_head = TiedLMHead(self.model.embed_tokens, context)
        else:
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, context, f"{prefix}lm_head"
            )

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        """The rotary embedding, shared by all layers that rotate."""
        return RotaryEmbedding(config, head_size(config), context)

    def create_rotaries(
        self, config: PretrainedConfig, context: LayerContext
    ) -> Sequence[RotaryEmbedding]:
        """The rotary embedding of each layer."""
        return [self.create_rotary(config, context)] * config.num_hidden_layers

    @staticmethod
    def embedding_scale(config: PretrainedConfig, context: LayerContext) -> float:
        """Factor on the embedding's rows."""
        return 1.0

    @property
    def weight_mapping(self) -> WeightMapping:
        ignored = (r".*\.rotary_emb\.inv_freq",)
        return WeightMapping(
            renames=(),
            packed={
                "qkv_proj": ("q_proj", "k_proj", "v_proj"),
                "gate_up_proj": ("gate_proj", "up_proj"),
            },
            ignored=(*ignored, r"lm_head\.weight") if self.tied else ignored,
        )

    @property
    def token_embedding(self) -> VocabParallelEmbedding:
        return self.model.embed_tokens

    @property
    def output_head(self) -> OutputHead:
        return self.lm_head

    @property
    def final_norm(self) -> RMSNorm:
        return self.model.norm

    def forward(self, model_input: ModelInput) -> ModelOutput:
        output: ModelOutput = self.model(model_input)
        return output

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden_states)
        return logits

    def set_aux_layer_ids(self, layer_ids: tuple[int, ...]) -> None:
        check_aux_layer_ids(layer_ids, len(self.model.layers))
        self.model.aux_layer_ids = layer_ids

    def default_aux_layer_ids(self) -> tuple[int, ...]:
        return spread_aux_layer_ids(len(self.model.layers))


def has_mlp_bias(config: PretrainedConfig) -> bool:
    """Whether MLPs have biases: only some families read the field that any config may state."""
    return config.model_type in _WITH_MLP_BIAS and bool(config.mlp_bias)


def head_size(config: PretrainedConfig) -> int:
    """Elements of one attention head."""
    explicit = getattr(config, "head_dim", None)  # absent from older configs
    return int(explicit or config.hidden_size // config.num_attention_heads)
