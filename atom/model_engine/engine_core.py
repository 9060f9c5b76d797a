"""The engine: a scheduler and an executor, run one step at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from atom.batch import LaunchedStep, ScheduledBatch
from atom.config import EngineConfig
from atom.messages import (
    EngineDeadError,
    EngineLimits,
    EngineRequest,
    EngineStats,
    RefusedSequence,
    SequenceOutput,
    StepReport,
)
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.executor import Executor, create_executor
from atom.model_engine.grammar_queue import GrammarQueue
from atom.model_engine.scheduler import Scheduler
from atom.model_loader.source import ModelSource
from atom.platform import is_device_lost, is_out_of_memory, release_cached_memory
from atom.structured_output.params import StructuredOutput

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class _EndsTheEngine:
    """Any exception within ends the engine, since its tables may be half changed.

    Attributes:
        cause: of the end; None while the engine can run.
    """

    def __init__(self) -> None:
        self.cause: str | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if error is None:
            return
        self.cause = f"{type(error).__name__}: {error}"
        if isinstance(error, Exception):
            raise EngineDeadError(self.cause) from error


class EngineCore:
    """Owns all live sequences. Not thread-safe.

    Constructing it loads the model and allocates the KV cache.

    Args:
        executor: runs the batches; None for the configured one.
        source: the model, if it is resolved already.

    Raises:
        ConfigError: when the model or an option cannot be honoured.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor | None = None,
        source: ModelSource | None = None,
    ) -> None:
        self.executor: Executor = executor or create_executor(config, source)
        self.limits: EngineLimits = self.executor.limits
        # None: without recurrent states, which blocks alone do not bring back.
        caches_prefixes = config.cache.enable_prefix_caching and self.limits.state_slots != 0
        self.block_pool = BlockPool(self.limits.num_blocks, self.limits.block_size, caches_prefixes)
        self._scheduler = Scheduler(
            config.scheduler,
            self.block_pool,
            self.limits,
            self.executor.eos_token_ids,
            self.executor.lookahead,
        )
        self._grammar_queue = GrammarQueue(self.executor.grammars)
        self._was_out_of_memory = False
        self._end = _EndsTheEngine()
        # Refusals that the next step reports.
        self._refused: list[RefusedSequence] = []
        # Launched steps whose results are not read yet, oldest first.
        self._launched: deque[tuple[ScheduledBatch, LaunchedStep]] = deque()
        # Tokens of the steps that run, or of the last one.
        self.num_step_tokens = 0
        # Whether the model runs. Only then is an interrupt harmless.
        self.is_computing = False

    def add_request(self, request: EngineRequest) -> None:
        """Queue a sequence.

        If it has a grammar that is not compiled yet, it enters the scheduler once it is; if
        compilation fails, a later `StepReport` refuses it.

        Raises:
            RequestRefusedError: when it could never run as given.
            EngineDeadError: when the engine is dead.
        """
        self._check_alive()
        if request.params.structured_output is not None:
            self._grammar_queue.add(request)
        else:
            self._scheduler.add(request)

    def abort(self, ids: Iterable[str]) -> list[SequenceOutput]:
        """Abort sequences; their blocks are free when this returns, or after the next step if a
        launched step computes them beside others.
        """
        ids = list(ids)
        outputs = self._grammar_queue.abort(ids) + self._scheduler.abort(ids)
        with suppress(EngineDeadError):  # the next request is told
            self._drain()
        return outputs

    def compile_grammar(self, wanted: StructuredOutput) -> None:
        """Compile a grammar, blocking, so that a request with it is scheduled at once.

        Raises:
            RequestRefusedError: when it cannot be compiled.
        """
        self._grammar_queue.compile(wanted)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_unfinished or bool(self._grammar_queue.waiting)

    @property
    def max_idle_ms(self) -> int | None:
        """Without work, `step` must be called after so long at the latest; None for never."""
        return self.executor.max_idle_ms

    @property
    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        stats.num_waiting += len(self._grammar_queue.waiting)
        return stats

    def step(self) -> StepReport:
        """Launch the next batch and report the results of the oldest one.

        With `depth` 1 of the executor these are the same batch; with 2 the next one is launched
        before the results of the last one are read.

        If all requests wait for their grammars, first waits briefly for one of them, unless other
        engines wait for this one.

        A batch that fails is given back to the scheduler, which finds the sequence that caused it;
        with it one whose results are not read. If the model is interrupted (by a `BaseException`
        that is no `Exception`, while `is_computing`), all are given back, too, and the exception is
        re-raised. An interrupt at any other time ends the engine.

        Raises:
            EngineDeadError: when the device is lost, two steps in a row ran out of memory, an empty
                batch failed, or scheduling failed.
        """
        self._check_alive()
        if self._grammar_queue.waiting:
            self._admit_compiled()
        while len(self._launched) < self.executor.depth and self._launch():
            pass
        outputs = self._collect() if self._launched else []
        self._drain()
        with self._end:
            refused, self._refused = self._refused + self._scheduler.take_refused(), []
            ended = [output.id for output in outputs if output.finish_reason is not None]
            if ended or refused:
                self._grammar_queue.forget([*ended, *(sequence.id for sequence in refused)])
            return StepReport(outputs=outputs, refused=refused)

    def reset_prefix_cache(self) -> bool:
        """Forget all KV; false, with nothing done, while a sequence is live."""
        return not self.has_work and self.block_pool.reset()

    def shutdown(self) -> None:
        self.executor.shutdown()

    def _admit_compiled(self) -> None:
        """Pass requests whose grammar is ready to the scheduler."""
        if not self._scheduler.has_unfinished and self.max_idle_ms != 0:
            self._grammar_queue.wait()
        with self._end:
            self._refused += self._grammar_queue.release(self._scheduler.add)

    def _launch(self) -> bool:
        """Launch the next batch; false if none can follow those that run, or it failed."""
        before = self._launched[-1][1] if self._launched else None
        with self._end:
            batch = self._scheduler.schedule(before)
        if not batch.sequences and self._launched:
            return False
        self.num_step_tokens = batch.num_tokens
        if self._launched:
            self.num_step_tokens += sum(other.num_tokens for other, _ in self._launched)
        launched = self._run(batch, lambda: self.executor.launch(batch))
        if launched is not None:
            self._launched.append((batch, launched))
        return launched is not None

    def _collect(self) -> list[SequenceOutput]:
        """Read the results of the oldest step."""
        batch, launched = self._launched[0]
        output = self._run(batch, launched.collect)
        if output is None:
            return []
        self._launched.popleft()
        self._was_out_of_memory = False
        with self._end:
            return self._scheduler.update(batch, output)

    def _drain(self) -> None:
        """Finish steps that compute nothing but sequences that have ended."""
        while self._launched and not self._scheduler.has_unfinished:
            self._collect()

    def _run(self, batch: ScheduledBatch, work: Callable[[], _T]) -> _T | None:
        """Do a part of a batch's step; None when it failed and the engine can go on."""
        self.is_computing = self.executor.can_be_interrupted
        try:
            result = work()
        except EngineDeadError as error:
            self._end.cause = str(error)
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            out_of_memory = is_out_of_memory(error)
            repeats = out_of_memory and self._was_out_of_memory
            # An empty batch is nobody's: there is no request to end.
            if is_device_lost() or repeats or not batch.sequences:
                self._end.cause = cause
                raise EngineDeadError(cause) from error
            logger.exception("a step with %d sequences failed", len(batch.sequences))
            message = f"the step that computed nothing but this sequence failed: {cause}"
            self._launched.clear()
            self._scheduler.give_back(batch, message, one_by_one=out_of_memory)
            if out_of_memory:
                release_cached_memory()
            self._was_out_of_memory = out_of_memory
            return None
        except BaseException:
            self._launched.clear()
            self._scheduler.give_back(batch, None)
            raise
        finally:
            self.is_computing = False
        return result

    def _check_alive(self) -> None:
        if self._end.cause is not None:
            raise EngineDeadError(f"the engine failed: {self._end.cause}")
