"""What a rank says of itself when it meets the others."""

from __future__ import annotations

from typing import Any

import torch

from atom.config import EngineConfig
from atom.distributed.rendezvous import RankCard
from atom.model_loader.drafts.folder import draft_folder
from atom.model_loader.identity import checkpoint_identity
from atom.model_loader.source import resolve_model
from atom.options import options_of
from atom.platform import select_platform
from atom.version import __version__

# Checkpoints are told apart by what is in them, and the rest may differ from machine to machine.
_OWN = {"model", "draft_model", "tokenizer", "revision"}
_OWN |= {"node_rank", "master_addr", "master_port", "num_threads"}


def own_card(config: EngineConfig, rank: int, world_size: int) -> RankCard:
    """This process's card.

    Raises:
        ConfigError, WeightError: when there is no such device, model or draft.
    """
    platform = select_platform(config.device)
    versions = {
        "the version of atom": __version__,
        "the version of torch": str(torch.__version__),
        "the device": f"{platform.kind} {platform.arch}" if platform.is_gpu else platform.kind,
    }
    return RankCard.own(rank, world_size, versions, _flags(config), _checkpoints(config))


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
