"""The engine: a scheduler and an executor, one step at a time."""

from __future__ import annotations

from collections.abc import Iterable

from atom.config import EngineConfig
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.executor import Executor, UniprocExecutor
from atom.model_engine.messages import (
    EngineLimits,
    EngineRequest,
    EngineStats,
    SequenceOutput,
    StepReport,
)
from atom.model_engine.scheduler import Scheduler


class EngineCore:
    """Owns all live sequences. Not thread-safe: one loop drives it.

    Building one loads the model and allocates the KV cache.

    Args:
        executor: runs the batches; one in this process when None.

    Raises:
        ConfigError: when the model or an option cannot be honoured.
    """

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        self.executor: Executor = executor or UniprocExecutor(config)
        self.limits: EngineLimits = self.executor.limits
        self.block_pool = BlockPool(
            self.limits.num_blocks, self.limits.block_size, config.cache.enable_prefix_caching
        )
        self._scheduler = Scheduler(
            config.scheduler,
            self.block_pool,
            self.limits,
            self.executor.eos_token_ids,
            self.executor.lookahead,
        )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a sequence.

        Raises:
            RequestRefusedError: when it could never run as given.
        """
        self._scheduler.add(request)

    def abort(self, ids: Iterable[str]) -> list[SequenceOutput]:
        """End sequences now; their blocks are free when this returns."""
        return self._scheduler.abort(ids)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_unfinished

    @property
    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def step(self) -> StepReport:
        """Run one batch and report what came of it."""
        batch = self._scheduler.schedule()
        output = self.executor.step(batch)
        return StepReport(outputs=self._scheduler.update(batch, output), stats=self.stats)

    def shutdown(self) -> None:
        self.executor.shutdown()
