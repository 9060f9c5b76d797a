"""Shows which implementation runs each op of an engine."""

from __future__ import annotations

from dataclasses import replace

from atom.config import ConfigError, EngineConfig
from atom.model_engine.executor import create_executor
from atom.model_loader.source import resolve_model


def describe_ops(config: EngineConfig) -> str:
    """What computes the model, and the op table of the first rank; replicas all have the same.

    Starts all ranks, which load the model and allocate the KV cache as for serving, since the
    choice depends on their sizes.

    Raises:
        ConfigError: when the model or an option cannot be honoured.
        EngineDeadError: when a rank is lost.
        OpUnavailableError: when an `ATOM_OP_*` override cannot be honoured.
    """
    if config.parallel.couples_engines:
        raise ConfigError(
            f"the {config.parallel.data_parallel_size} engines of --data-parallel-size that share "
            f"experts are started by the server alone, which logs the table of ops: leave out "
            f"--show-ops"
        )
    if config.parallel.num_replicas > 1:
        config = replace(config, parallel=replace(config.parallel, data_parallel_size=1))
    source = resolve_model(config.model)
    executor = create_executor(config, source)
    try:
        return f"{executor.ops.describe()}\nmodel: {source.implementation}"
    finally:
        executor.shutdown()
