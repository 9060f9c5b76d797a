"""The engine: a scheduler and an executor, one step at a time."""

from __future__ import annotations

from collections.abc import Iterable

from atom.config import EngineConfig
from atom.messages import (
    EngineLimits,
    EngineRequest,
    EngineStats,
    SequenceOutput,
    StepReport,
)
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.executor import Executor, UniprocExecutor
from atom.model_engine.grammar_queue import GrammarQueue
from atom.model_engine.scheduler import Scheduler
from atom.structured_output.params import StructuredOutput


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
        self._grammar_queue = GrammarQueue(self.executor.grammars)
        # Of the step under way, or the last one.
        self.num_step_tokens = 0

    def add_request(self, request: EngineRequest) -> None:
        """Queue a sequence.

        One with a grammar that is not compiled yet enters the scheduler later, while others run;
        if it turns out then that it cannot, a step's report refuses it.

        Raises:
            RequestRefusedError: when it could never run as given.
        """
        if request.params.structured_output is not None:
            self._grammar_queue.add(request)
        else:
            self._scheduler.add(request)

    def abort(self, ids: Iterable[str]) -> list[SequenceOutput]:
        """End sequences now; their blocks are free when this returns."""
        ids = list(ids)
        return self._grammar_queue.abort(ids) + self._scheduler.abort(ids)

    def compile_grammar(self, wanted: StructuredOutput) -> None:
        """Wait until a grammar is compiled, so that a request with it can run at once.

        Raises:
            RequestRefusedError: when it cannot be.
        """
        self._grammar_queue.compile(wanted)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_unfinished or self._grammar_queue.has_waiting

    @property
    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        stats.num_waiting += self._grammar_queue.num_waiting
        return stats

    def step(self) -> StepReport:
        """Run one batch and report what came of it.

        When grammars are all there is to wait for, waits for one of them, but not for long.
        """
        if not self._scheduler.has_unfinished:
            self._grammar_queue.wait()
        refused = self._grammar_queue.release(self._scheduler.add)
        batch = self._scheduler.schedule()
        self.num_step_tokens = batch.num_tokens
        outputs = self._scheduler.update(batch, self.executor.step(batch))
        refused += self._scheduler.take_refused()
        self._grammar_queue.forget(o.id for o in outputs if o.finish_reason is not None)
        self._grammar_queue.forget(sequence.id for sequence in refused)
        return StepReport(outputs=outputs, stats=self.stats, refused=refused)

    def shutdown(self) -> None:
        self.executor.shutdown()
