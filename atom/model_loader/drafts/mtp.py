"""Loads the multi-token prediction layers from the target's checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from functools import partial

import torch

from atom.config import ConfigError, ModelOptions
from atom.model_loader.checkpoint import list_tensors
from atom.model_loader.safetensors.reader import CheckpointTensor, map_tensor
from atom.model_loader.source import ModelSource
from atom.model_loader.weights import build_model
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.formats.online import OnlineConfig
from atom.models.base import CausalLM
from atom.models.layers.mtp import MTPParts, MTPTarget, PredictionLayers

logger = logging.getLogger(__name__)

_NUMBERS = ("F32", "F16", "BF16")


def load_mtp(
    target: CausalLM, source: ModelSource, context: LayerContext, options: ModelOptions
) -> PredictionLayers:
    """Build and load the prediction layers that follow the target's last layer.

    Their embedding and head are the target's if the checkpoint has no others.

    Args:
        target: loaded.
        source: of the target's checkpoint, which includes the layers.

    Raises:
        ConfigError: when the model has no such layers.
        WeightError: for tensors that are missing, unexpected or do not fit.
    """
    if not isinstance(target, MTPTarget):
        architectures = ", ".join(source.hf_config.architectures or ["?"])
        raise ConfigError(
            f"method mtp drafts with the prediction layers of DeepSeek-V3, Kimi, GLM and "
            f"Qwen3-Next checkpoints; {source.name} is a {architectures}; use method eagle3 or "
            f"suffix"
        )
    layer_ids = target.mtp_layer_ids
    if not layer_ids:
        given = getattr(target.config, "num_nextn_predict_layers", None)
        raise ConfigError(
            f"method mtp needs prediction layers and {source.name} has none "
            f"(num_nextn_predict_layers={given}); use method eagle3 or suffix"
        )
    parts = [MTPParts() for _ in layer_ids]
    if options.load_format != "dummy":
        parts = _parts(target, layer_ids, source)
    source = dataclasses.replace(source, name=f"{source.name} (prediction layers)")
    mtp = build_model(partial(PredictionLayers, target, parts), source, context, options)
    logger.info(
        "%s: layers %s, with an embedding of their own: %d, with a head of their own: %d",
        source.name,
        ", ".join(str(i) for i in layer_ids),
        sum(part.embed_tokens for part in parts),
        sum(part.head for part in parts),
    )
    return mtp


def _parts(target: MTPTarget, layer_ids: range, source: ModelSource) -> list[MTPParts]:
    """The embedding and head of each layer that differ from the target's."""
    tensors = {tensor.name: tensor for tensor in list_tensors(source.path)}
    for layer in map(target.mtp_prefix, layer_ids):
        if not any(name.startswith(f"{layer}.") for name in tensors):
            raise ConfigError(
                f"{source.path}: the config says num_nextn_predict_layers={len(layer_ids)}, and "
                f"the checkpoint holds no tensor of {layer}: it was saved without its "
                f"prediction layers; use the complete one, or method eagle3 or suffix"
            )
    is_stored = not isinstance(source.quantization, OnlineConfig)
    embedding = f"{target.prefix}model.embed_tokens"
    head = embedding if target.tied else f"{target.prefix}lm_head"
    return [
        MTPParts(
            embed_tokens=_differs(tensors, f"{layer}.embed_tokens", embedding),
            head=_differs(tensors, f"{layer}.shared_head.head", head),
            is_plain=is_stored and _is_plain(tensors.values(), f"{layer}."),
        )
        for layer in map(target.mtp_prefix, layer_ids)
    ]


def _is_plain(tensors: Iterable[CheckpointTensor], layer: str) -> bool:
    """Whether a layer has numbers only: no codes, which always need another type."""
    return all(tensor.dtype in _NUMBERS for tensor in tensors if tensor.name.startswith(layer))


def _differs(tensors: Mapping[str, CheckpointTensor], module: str, shared: str) -> bool:
    """Whether the checkpoint has tensors of `module`, and they are no copies of those of `shared`.

    A quantised matrix is several tensors.
    """
    names = (name.removeprefix(module) for name in tensors if name.startswith(f"{module}."))
    return any(not _are_equal(tensors[module + name], tensors.get(shared + name)) for name in names)


def _are_equal(a: CheckpointTensor, b: CheckpointTensor | None) -> bool:
    if b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(map_tensor(a), map_tensor(b))
