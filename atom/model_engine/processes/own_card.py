"""What a rank says of itself when it meets the others."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from atom.config import EngineConfig
from atom.distributed.rendezvous import RankCard
from atom.environment import kernel_variables
from atom.model_loader.drafts.folder import draft_folder
from atom.model_loader.identity import checkpoint_identity
from atom.model_loader.source import resolve_model
from atom.options.fields import options_of
from atom.platform import Platform, num_compute_units, select_platform
from atom.version import __version__

# Modules that kernels and models come from, and the distributions that have them.
_LIBRARIES = {
    "aiter": ("amd-aiter", "aiter"),
    "flash_mla": ("flash-mla",),
    "flydsl": ("flydsl",),
    "transformers": ("transformers",),
    "triton": ("triton", "triton-rocm", "pytorch-triton", "pytorch-triton-rocm"),
}
# Checkpoints are told apart by what is in them, and the rest may differ from machine to machine.
_OWN = {"model", "draft_model", "tokenizer", "revision"}
_OWN |= {"node_rank", "master_addr", "master_port", "num_threads"}


def own_card(config: EngineConfig, rank: int, local_rank: int, world_size: int) -> RankCard:
    """This process's card.

    Raises:
        ConfigError, WeightError: when there is no such device, model or draft.
    """
    versions = {
        "the version of atom": __version__,
        "the version of torch": str(torch.__version__),
        **{f"the version of {name}": _version(name) for name in _LIBRARIES},
        **_device(select_platform(config.device), local_rank),
    }
    return RankCard.own(
        rank, world_size, versions, kernel_variables(), _flags(config), _checkpoints(config)
    )


def _version(library: str) -> str:
    """As installed; nothing is imported for it, which may take seconds."""
    found = []
    for distribution in _LIBRARIES[library]:
        try:
            found.append(version(distribution))
        except PackageNotFoundError:
            continue
    if not found:
        return "unknown" if find_spec(library) is not None else "absent"
    return " and ".join(found)


def _device(platform: Platform, local_rank: int) -> dict[str, str]:
    """What choices and sizes follow from. Memory is not among it: ranks agree on their blocks."""
    if not platform.is_gpu:
        return {"the device": platform.kind}
    return {
        "the device": f"{platform.kind} {platform.arch}",
        "the number of the device's compute units": str(num_compute_units(platform, local_rank)),
    }


def _flags(config: EngineConfig) -> dict[str, str]:
    flags = {}
    for option in options_of(EngineConfig):
        if option.name in _OWN or option.is_document:
            continue
        group = config if option.group is None else getattr(config, option.group)
        value = None if group is None else getattr(group, option.field.name)
        flags[option.flag] = "not given" if value is None else _written(value)
    return flags


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _checkpoints(config: EngineConfig) -> dict[str, str]:
    identity = checkpoint_identity(resolve_model(config.model).path)
    if config.speculative is None or config.speculative.model is None:
        return identity
    folder = draft_folder(config.speculative.model, config.model)
    return identity | {
        f"the draft's {name}": value for name, value in checkpoint_identity(folder).items()
    }
