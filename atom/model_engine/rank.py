"""What is settled about a rank before weights are loaded: its device, dtypes and context length."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from atom.config import ConfigError, EngineConfig
from atom.distributed.ordered import in_order
from atom.distributed.parallel_state import ParallelGroups
from atom.environment import keep_kernels
from atom.kv_cache.base import storage_dtype
from atom.model_engine.expert_ranks import expert_ranks
from atom.model_loader.source import ModelSource
from atom.model_ops.layer_context import LayerContext
from atom.models.config.model_config import PretrainedConfig
from atom.numa import bind_to_gpu
from atom.platform import Platform, pci_address, select_platform

logger = logging.getLogger(__name__)

DTYPES_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Rank:
    """One rank of an engine.

    Attributes:
        groups: with the others.
        platform: that it runs on.
        source: the model.
        context: what its layers are built with: the device, the model's dtype, the longest context.
        storage: the dtype of the KV cache.
        overlaps: whether each step is launched before the results of the last one are read.
    """

    config: EngineConfig
    groups: ParallelGroups
    platform: Platform
    source: ModelSource
    context: LayerContext
    storage: torch.dtype
    overlaps: bool

    @classmethod
    def create(
        cls, config: EngineConfig, groups: ParallelGroups, platform: Platform, source: ModelSource
    ) -> Rank:
        """Raises:
        ConfigError: for a longer context than the model allows.
        """
        context = _create_context(config, groups, platform, source)
        storage = storage_dtype(config.cache, context)
        return cls(config, groups, platform, source, context, storage, _overlaps(config, platform))

    @property
    def vocab_size(self) -> int:
        return int(self.source.hf_config.get_text_config().vocab_size)


def take_device(config: EngineConfig, groups: ParallelGroups) -> Platform:
    """The platform to run on; on a GPU, this rank's device becomes the current one, its threads
    are bound to the processors beside it, and kernels that are compiled from now on are kept.
    """
    platform = select_platform(config.device)
    if platform.is_gpu:
        keep_kernels()
        torch.cuda.set_device(groups.local_rank)
        bind_to_gpu(groups.local_rank, pci_address(groups.local_rank))
    return platform


def resolve_dtype(name: str, source: ModelSource) -> torch.dtype:
    """The dtype of the `--dtype` option; `auto` means the checkpoint's."""
    if name == "auto":
        return source.default_dtype
    return DTYPES_BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _create_context(
    config: EngineConfig, groups: ParallelGroups, platform: Platform, source: ModelSource
) -> LayerContext:
    # Of ranks on several machines this one sees only some.
    is_local = groups.num_local >= groups.tp.size
    ranks = replace(groups.tp, peer_access=is_local)
    if config.sums_in_order:
        ranks = in_order(ranks)
    text_config = source.hf_config.get_text_config()
    context = LayerContext.create(
        resolve_dtype(config.model.dtype, source),
        _resolve_max_model_len(text_config, config.model.max_model_len),
        platform,
        ranks,
        batch_invariant=config.batch_invariant,
    )
    # With its index: another thread's current device is the first one.
    device = torch.device("cuda", groups.local_rank) if platform.is_gpu else context.device
    return replace(
        context,
        device=device,
        experts=expert_ranks(config, groups, ranks),
        images=config.model.reads_images,
        state_dtype=DTYPES_BY_NAME[config.cache.mamba_ssm_cache_dtype],
    )


def _model_context_len(config: PretrainedConfig) -> int:
    """The number of positions that the model config allows, including RoPE scaling.

    `linear` and `dynamic` scaling multiply `max_position_embeddings`; in `yarn` and `llama3`
    configs it is the scaled length already.
    """
    length = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}  # some models do not rotate
    if rope.get("rope_type") in ("linear", "dynamic"):
        length = int(length * rope["factor"])
    return length


def _resolve_max_model_len(config: PretrainedConfig, requested: int | None) -> int:
    """The context length to serve: `requested`, or the model's limit if None.

    Raises:
        ConfigError: when more is requested than the model allows.
    """
    limit = _model_context_len(config)
    if requested is None:
        return limit
    if requested > limit:
        raise ConfigError(
            f"max_model_len={requested} exceeds the {limit} positions of the model's config"
        )
    return requested


def _overlaps(config: EngineConfig, platform: Platform) -> bool:
    """On a GPU unless told otherwise, where steps can overlap."""
    if config.scheduler.overlap is not None or not platform.is_gpu:
        return bool(config.scheduler.overlap)
    if config.overlap_obstacle is not None:
        logger.info("steps do not overlap: %s", config.overlap_obstacle)
    return config.overlap_obstacle is None
