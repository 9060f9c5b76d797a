"""Qwen3.5: Qwen3-Next with separate projections, dense or with experts, and a vision tower."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer
from atom.model_ops.linear import ColumnParallelLinear, LinearBase, share_of, stack
from atom.model_ops.quant.base import LayerKind
from atom.model_ops.quant.storage import MatrixStorage
from atom.model_ops.rotary import MRotaryEmbedding, RotaryEmbedding
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.hybrid.qwen3_next import GatedDeltaNet, Qwen3NextDecoderLayer, Qwen3NextForCausalLM
from atom.models.llama import LlamaMLP, head_size
from atom.models.moe.qwen2_moe import Qwen2MoE
from atom.models.phi3 import rotated_size
from atom.models.vision.encoder import ImageEncoder
from atom.models.vision.qwen3_vl import Qwen3ImageEncoder

logger = logging.getLogger(__name__)

# As in the files of models that also see.
_TEXT = ("model.language_model.", "model.")
_TOWER = ("model.visual.", "visual.")
_VISION = (r"model\.visual\..*",)
_SECTIONS = (11, 11, 10)


class FusedColumnLinear(LinearBase):
    """Column-parallel matrices that the checkpoint stores one above the other, as one.

    Args:
        sizes: of their outputs, by names that the checkpoint does not have.
    """

    def __init__(
        self, in_features: int, sizes: dict[str, int], context: LayerContext, prefix: str
    ) -> None:
        rows = {name: share_of(context.group, size, name) for name, size in sizes.items()}
        super().__init__(stack(rows, in_features), False, context, prefix)

    def _create_storage(
        self, context: LayerContext, prefix: str, kind: LayerKind, has_bias: bool
    ) -> MatrixStorage:
        method = context.quant.method_for(prefix, (), kind)
        return MatrixStorage(self, tuple(self.parts.values()), method, context, has_bias=has_bias)


class Qwen35DeltaNet(GatedDeltaNet):
    """Source: transformers' `qwen3_5`."""

    def create_projections(self, hidden_size: int, context: LayerContext, prefix: str) -> None:
        sizes = {"queries": self.keys, "keys": self.keys, "values": self.values}
        self.in_proj_qkv = FusedColumnLinear(hidden_size, sizes, context, f"{prefix}.in_proj_qkv")
        heads = self.values // self.value_dim
        self.in_proj_z, self.in_proj_a, self.in_proj_b = (
            ColumnParallelLinear(hidden_size, size, False, context, f"{prefix}.in_proj_{name}")
            for name, size in (("z", self.values), ("a", heads), ("b", heads))
        )

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate = self.in_proj_z(x).view(len(x), -1, self.value_dim)
        return self.in_proj_qkv(x), gate, self.in_proj_a(x), self.in_proj_b(x)


class Qwen35DecoderLayer(Qwen3NextDecoderLayer):
    linear_class = Qwen35DeltaNet

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        return LlamaMLP(config, config.intermediate_size, context, prefix)


class Qwen35MoE(Qwen2MoE):
    """Always renormalises."""

    @staticmethod
    def renormalizes(config: PretrainedConfig) -> bool:
        return True


class Qwen35MoeDecoderLayer(Qwen35DecoderLayer):
    """Every layer has experts."""

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        return Qwen35MoE(config, context, prefix)


class Qwen35ForCausalLM(Qwen3NextForCausalLM):
    """Source of names and computation: transformers' `qwen3_5`, text model."""

    layer_class = Qwen35DecoderLayer

    @property
    def weight_mapping(self) -> WeightMapping:
        mapping = super().weight_mapping
        unread = _VISION if self.image_encoder is None else ()
        return replace(mapping, renames=(_TEXT, _TOWER), ignored=(*mapping.ignored, *unread))


class Qwen35MoeForCausalLM(Qwen35ForCausalLM):
    """The same of transformers' `qwen3_5_moe`."""

    layer_class = Qwen35MoeDecoderLayer


class Qwen35ForConditionalGeneration(Qwen35ForCausalLM):
    """The checkpoint's `model.language_model.*` and, with images, its `model.visual.*`."""

    trunk = "model.language_model"

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__(config.get_text_config(), context)
        self.visual = Qwen3ImageEncoder(config, context) if context.images else None
        if self.visual is None and context.device.type != "meta":  # not when it is only sketched
            logger.info("%s runs as a text model: vision weights are skipped", config.model_type)

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        if not context.images:
            return super().create_rotary(config, context)
        sections = config.rope_parameters.get("mrope_section", _SECTIONS)
        head, rotated = head_size(config), rotated_size(config)
        return MRotaryEmbedding(config, head, context, sections, mixed=True, rotary_dim=rotated)

    @property
    def image_encoder(self) -> ImageEncoder | None:
        return self.visual


class Qwen35MoeForConditionalGeneration(Qwen35ForConditionalGeneration):
    layer_class = Qwen35MoeDecoderLayer
