"""Which implementation would run each operation of an engine."""

from __future__ import annotations

from atom.config import EngineConfig
from atom.model_engine.executor import UniprocExecutor


def describe_ops(config: EngineConfig) -> str:
    """The table of ops of an engine; nothing is served.

    The model is loaded and the KV cache allocated as for serving, since what runs depends on
    their sizes.

    Raises:
        ConfigError: when the model or an option cannot be honoured.
        OpUnavailableError: when an override cannot be.
    """
    executor = UniprocExecutor(config)
    try:
        return executor.ops.describe()
    finally:
        executor.shutdown()
