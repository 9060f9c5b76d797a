"""Runs scheduled batches, on one rank or on several that take part in every step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Protocol

import msgspec

from atom.batch import LaunchedStep, Lookahead, RankStep, ScheduledBatch, StepOutput
from atom.config import EngineConfig
from atom.distributed.parallel_state import ParallelGroups
from atom.distributed.stages import Stages
from atom.messages import EngineDeadError, EngineLimits
from atom.model_engine.processes.causes import is_users
from atom.model_engine.processes.lockstep import Lockstep
from atom.model_engine.start_up.start_log import said_what_is_awaited
from atom.model_engine.worker import Worker
from atom.model_loader.source import ModelSource
from atom.model_ops.kernels.aiter_modules import list_builds
from atom.sampling.failure import SamplingFailedError
from atom.structured_output.cache import GrammarCache

logger = logging.getLogger(__name__)

# How often an engine without work looks after its ranks.
_IDLE_MS = 1000
_NOTHING = ScheduledBatch([], [], [])
_encoder = msgspec.msgpack.Encoder()
_rank_steps: msgspec.msgpack.Decoder[RankStep] = msgspec.msgpack.Decoder(RankStep)


class Executor(Protocol):
    """Runs scheduled batches.

    Attributes:
        can_be_interrupted: whether an interrupted step leaves the executor usable.
        max_idle_ms: without work, run an empty batch after so long at the latest, since other
            engines wait, or ranks may be lost; None when that is not needed.
        depth: how many steps may be launched before the results of the first are read: 1 or 2.
    """

    limits: EngineLimits
    eos_token_ids: frozenset[int]
    lookahead: Lookahead
    can_be_interrupted: bool
    depth: int

    @property
    def grammars(self) -> GrammarCache: ...

    @property
    def max_idle_ms(self) -> int | None: ...

    def launch(self, batch: ScheduledBatch) -> LaunchedStep: ...

    def shutdown(self) -> None: ...


class Driver(Protocol):
    """The first rank's connection to the others.

    Attributes:
        groups: the first rank's.
        lost: why another rank was lost; None if none was.
        is_awaited: whether the program waits for a step, or for the engine to be built. If that is
            still so long after a rank was lost, the process ends.
        stages: of the first rank's start.
    """

    groups: ParallelGroups
    is_awaited: bool
    stages: Stages

    @property
    def lost(self) -> str | None: ...

    @property
    def awaited(self) -> list[str]:
        """What each rank does that is not as far in its start as this one, one phrase each."""
        ...

    def publish(self, data: bytes) -> None:
        """Send to all other ranks, in order."""
        ...

    def failure(self) -> str | None:
        """Why another rank was lost, after waiting briefly for the cause; None if none was."""
        ...

    def close(self, cause: str | None = None) -> None:
        """End the other ranks, because of `cause` or as it should be."""
        ...


class Follower(Protocol):
    """Another rank's connection to the first.

    Attributes:
        groups: this rank's.
        stages: of this rank's start.
    """

    groups: ParallelGroups
    stages: Stages

    def receive(self) -> bytes | None:
        """What the first rank published next; None when it has ended."""
        ...

    def failed(self, cause: str) -> None:
        """Tell the first rank that this one cannot go on."""
        ...

    def close(self) -> None: ...


class RanksExecutor:
    """The first of several ranks: tells the others of each step and takes part in it.

    Once a step is published, an error on any rank ends the engine, since the ranks are no longer at
    the same place. What one request may cause fails before, or after all ranks are through. The
    same holds for other engines, if they share the experts.

    Attributes:
        ops: the implementations selected on this rank.
    """

    can_be_interrupted = False

    def __init__(
        self, config: EngineConfig, driver: Driver, source: ModelSource | None = None
    ) -> None:
        self._driver = driver
        self._is_published = False
        self._failure: str | None = None
        try:
            self._worker = self._start(config, source)
        except Exception as error:
            # What is wrong for one rank is mostly wrong for all.
            failure = None if is_users(error) else driver.failure()
            driver.close(failure or _describe(error))
            if failure is not None:
                raise EngineDeadError(failure) from error
            raise
        self._lockstep = Lockstep(driver.groups.dp_cpu, self._worker.drafts_share_experts)
        self.limits = self._worker.limits
        self.eos_token_ids = self._worker.eos_token_ids
        self.lookahead = self._worker.lookahead
        self.ops = self._worker.ops
        self.depth = self._worker.depth
        driver.is_awaited = False

    def _start(self, config: EngineConfig, source: ModelSource | None) -> Worker:
        groups, stages = self._driver.groups, self._driver.stages
        with said_what_is_awaited(stages, lambda: [*self._driver.awaited, *list_builds()]):
            return Worker(config, groups, publish=self._publish, source=source, stages=stages)

    @property
    def grammars(self) -> GrammarCache:
        return self._worker.grammars

    @property
    def max_idle_ms(self) -> int | None:
        return self._lockstep.max_idle_ms if self._lockstep.is_coupled else _IDLE_MS

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Launch a batch on all ranks; they go on without waiting for its results, too.

        Raises:
            EngineDeadError: when a rank failed or was lost; the other ranks are ended then. Reading
                the results may raise it, too.
        """
        with self._awaits_ranks():
            if batch == _NOTHING and not self._lockstep.is_coupled:
                return LaunchedStep(lambda: StepOutput([]))
            launched = self._launch(batch)
        collect = partial(self._collect, launched)
        return LaunchedStep(collect, launched.num_drafts, launched.draft_source)

    def _launch(self, batch: ScheduledBatch) -> LaunchedStep:
        self._is_published = False
        try:
            return self._worker.launch(batch)
        except SamplingFailedError as error:
            raise error.cause from None
        except EngineDeadError:
            raise
        except Exception as error:
            if self._is_published:
                raise self._death_by(error) from error
            if self._lockstep.is_coupled and batch.sequences:
                self._launch(_NOTHING).collect()  # the other engines compute theirs
            raise

    def _collect(self, launched: LaunchedStep) -> StepOutput:
        with self._awaits_ranks():
            try:
                output = launched.collect()
            except Exception as error:
                raise self._death_by(error) from error
            # A collective that was ended with the lost rank leaves anything in its tensors.
            if (lost := self._driver.lost) is not None:
                raise EngineDeadError(lost)
            return output

    def _death_by(self, error: Exception) -> EngineDeadError:
        """The ranks are no longer at the same place."""
        return EngineDeadError(self._driver.failure() or _describe(error))

    @contextmanager
    def _awaits_ranks(self) -> Iterator[None]:
        """The program waits for other ranks in here; they are ended when one of them failed."""
        self._driver.is_awaited = True
        try:
            if (failure := self._failure or self._driver.lost) is not None:
                raise EngineDeadError(failure)
            yield
        except EngineDeadError as error:
            self._failure = str(error)
            self._driver.close(self._failure)
            raise
        finally:
            self._driver.is_awaited = False

    def shutdown(self) -> None:
        self._lockstep.end()
        self._worker.shutdown()
        self._driver.close()

    def _publish(self, rank_step: RankStep) -> RankStep:
        rank_step = self._lockstep.agree(rank_step)
        if not rank_step.is_nothing:
            self._driver.publish(_encoder.encode(rank_step))
            self._is_published = True
        return rank_step


def _describe(error: Exception) -> str:
    return f"rank 0 raised {type(error).__name__}: {error}"


def create_executor(
    config: EngineConfig, source: ModelSource | None = None
) -> Worker | RanksExecutor:
    """The executor of a configuration: this process alone, or as the first of several ranks.

    Args:
        source: the model, if it is resolved already.

    Raises:
        ConfigError: when an option cannot be honoured, or other ranks were started otherwise.
    """
    if config.parallel.tensor_parallel_size == 1 and not config.parallel.couples_engines:
        stages = Stages()
        with said_what_is_awaited(stages, list_builds):
            return Worker(config, source=source, stages=stages)
    # One rank alone does without what connects several.
    from atom.model_engine.processes.join import join_as_driver

    return RanksExecutor(config, join_as_driver(config), source)


def follow(config: EngineConfig, follower: Follower) -> None:
    """Be one of the other ranks until the first one ends.

    Raises:
        Exception: whatever this rank failed with; the first rank knows it then.
    """
    try:
        worker = _start_other(config, follower)
        while (data := follower.receive()) is not None:
            worker.follow(_rank_steps.decode(data))
        worker.shutdown()
    except Exception as error:
        follower.failed(f"{type(error).__name__}: {error}")
        raise
    finally:
        follower.close()


def _start_other(config: EngineConfig, follower: Follower) -> Worker:
    """The first rank of a machine says what is built there."""
    stages, is_first_here = follower.stages, follower.groups.local_rank == 0
    with said_what_is_awaited(stages, list_builds) if is_first_here else nullcontext():
        return Worker(config, follower.groups, stages=stages)
