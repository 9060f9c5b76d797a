"""Starts the other ranks, and meets them."""

from __future__ import annotations

from typing import Any

from atom.config import ConfigError, EngineConfig


def join_as_driver(config: EngineConfig) -> Any:
    """The first rank's connection to the others.

    Raises:
        ConfigError: always, as yet.
    """
    size = config.parallel.tensor_parallel_size
    raise ConfigError(f"tensor_parallel_size={size} is not supported yet; use 1")
