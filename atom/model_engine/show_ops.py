"""Which implementation would run each operation of an engine."""

from __future__ import annotations

from atom.model_engine.arg_utils import EngineArgs
from atom.model_engine.executor import UniprocExecutor


def describe_ops(args: EngineArgs) -> str:
    """The table of ops of the engine that `args` stand for; nothing is served.

    The model is loaded and the KV cache allocated as for serving, since what runs depends on
    their sizes.

    Raises:
        ConfigError: when the model or an option cannot be honoured.
        OpUnavailableError: when an override cannot be.
    """
    executor = UniprocExecutor(args.create_config())
    try:
        return executor.ops.describe()
    finally:
        executor.shutdown()
