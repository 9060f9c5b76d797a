"""Shows which implementation runs each op of an engine."""

from __future__ import annotations

from atom.config import EngineConfig
from atom.model_engine.worker import Worker


def describe_ops(config: EngineConfig) -> str:
    """The engine's op table, as text.

    Loads the model and allocates the KV cache as for serving, since the choice depends on their
    sizes.

    Raises:
        ConfigError: when the model or an option cannot be honoured.
        OpUnavailableError: when an `ATOM_OP_*` override cannot be honoured.
    """
    executor = Worker(config)
    try:
        return executor.ops.describe()
    finally:
        executor.shutdown()
