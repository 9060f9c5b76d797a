"""The target's weights that a draft's training uses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from atom.config import EngineConfig
from atom.model_engine.rank import resolve_dtype
from atom.model_loader.source import ModelSource
from atom.model_loader.weights import build_model
from atom.model_ops.layer_context import LayerContext
from atom.models.llama import LlamaMLP
from atom.models.registry import create_model
from atom.platform import select_platform


@dataclass(frozen=True)
class TargetParts:
    """Attributes:
    embedding, head: [vocab, hidden], in the target's dtype.
    final_norm: [hidden].
    mlp: `gate_proj` and `up_proj` [intermediate, hidden] of the last dense layer; None without one.
    default_aux_layer_ids: boundary ids of the states that a draft reads by default.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    mlp: dict[str, torch.Tensor] | None
    default_aux_layer_ids: tuple[int, ...]


def load_target_parts(config: EngineConfig, source: ModelSource) -> TargetParts:
    """Raises:
    ConfigError: when the target cannot be loaded.
    """
    dtype = resolve_dtype(config.model.dtype, source)
    context = LayerContext.create(dtype, 1, select_platform(config.device))
    create = partial(create_model, source.hf_config)
    target = build_model(create, source, context, config.model)
    embedding, head = target.token_embedding.dense(), target.output_head.dense()
    mlps = [module for module in target.modules() if isinstance(module, LlamaMLP)]
    products = [mlp.gate_up_proj for mlp in mlps]
    dense = [p for p in products if p.storage.format is None and not p.storage.is_split]
    mlp = None
    if dense:
        gate, up = dense[-1].weight.data.float().chunk(2)
        mlp = {"gate_proj": gate.clone(), "up_proj": up.clone()}
    norm = target.final_norm.weight.data.float().clone()
    return TargetParts(embedding, head, norm, mlp, target.default_aux_layer_ids())
