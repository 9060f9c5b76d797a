"""The replicas of an engine: started together, and each again when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from atom.messages import EngineStats, StepReport
from atom.model_engine.processes import wire
from atom.model_engine.processes.engine_client import EngineClient
from atom.model_engine.replicas.replica import Replica
from atom.model_engine.replicas.total_stats import counters_of, total_stats

# When a replica that died is started again, and when no more.

# Seconds before each restart; after as many within the window there is none.
DELAYS = (1.0, 2.0, 5.0, 10.0, 30.0)
WINDOW_SECONDS = 600.0


class RestartPolicy:
    """The failures of one replica. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._failures: list[float] = []

    def failed(self, now: float) -> float | None:
        """Note a failure; returns how long to wait before a restart, None to give up."""
        self._failures = [time for time in self._failures if now - time < WINDOW_SECONDS]
        self._failures.append(now)
        number = len(self._failures)
        return DELAYS[number - 1] if number <= len(DELAYS) else None


logger = logging.getLogger(__name__)

StartedEngine = tuple[EngineClient, wire.Ready]
# Starts the engine with an index again.
Relaunch = Callable[[int], Awaitable[StartedEngine]]


class ReplicaSetListener(Protocol):
    """Called from the event loop."""

    def on_report(self, report: StepReport) -> None: ...

    def on_refused(self, sequence_id: str, error: Exception) -> None: ...

    def on_stuck(self, replica: Replica, trouble: str) -> None:
        """The only replica does not answer, and may yet."""

    def on_lost(self, replica: Replica, reason: str) -> None:
        """A replica has ended, with all that it had; called after `ReplicaSet.death` was set."""

    def on_restarted(self) -> None:
        """There is a replica again in the place of one that ended."""


@dataclass(frozen=True)
class ReplicaHealth:
    """`problem`: why a replica is not expected to answer; None when it is healthy."""

    problem: str | None
    num_restarts: int


class _Slot:
    """The place of one replica, which may be taken by several in turn."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.policy = RestartPolicy()
        self.restarting: asyncio.Task[None] | None = None
        self.num_restarts = 0
        # Why there will be no further one.
        self.end: str | None = None
        self._past = EngineStats()

    @property
    def stats(self) -> EngineStats:
        stats = self.replica.stats
        if self.replica.death is not None:
            stats = counters_of(stats)
        return total_stats([stats, self._past]) if self.num_restarts else stats

    @property
    def problem(self) -> str | None:
        if self.end is not None:
            return self.end
        if self.replica.death is not None:
            return f"restarting, since {self.replica.death}"
        return self.replica.trouble

    def take(self, replica: Replica) -> None:
        self._past = counters_of(self.stats)
        self.replica = replica
        self.num_restarts += 1
        self.restarting = None


class ReplicaSet:
    """Watches over at least one replica.

    Without `relaunch`, the death of one is that of all: a single one is not restarted, and engines
    that share experts cannot be one by one.

    Attributes:
        death: why there is no replica left, and will be none; None while there is.
    """

    def __init__(
        self,
        engines: Sequence[StartedEngine],
        relaunch: Relaunch | None,
        listener: ReplicaSetListener,
    ) -> None:
        self.death: str | None = None
        self._relaunch = relaunch
        self._listener = listener
        self._slots = [
            _Slot(Replica(index, client, ready, self))
            for index, (client, ready) in enumerate(engines)
        ]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def living(self) -> list[Replica]:
        """Those whose process has not ended."""
        return [slot.replica for slot in self._slots if slot.replica.death is None]

    @property
    def healthy(self) -> list[Replica]:
        """Those that are expected to answer."""
        return [slot.replica for slot in self._slots if slot.replica.trouble is None]

    @property
    def health(self) -> list[ReplicaHealth]:
        """Of each replica."""
        return [ReplicaHealth(slot.problem, slot.num_restarts) for slot in self._slots]

    @property
    def trouble(self) -> str | None:
        """Why no replica is expected to answer; None when one is."""
        if self.death is not None:
            return self.death
        problems = [slot.problem for slot in self._slots]
        if self._relaunch is None:
            return next((problem for problem in problems if problem is not None), None)
        if None in problems:
            return None
        return "; ".join(f"replica {index}: {text}" for index, text in enumerate(problems))

    @property
    def stats(self) -> list[EngineStats]:
        """Of each replica; counters go on over restarts."""
        return [slot.stats for slot in self._slots]

    async def stop(self) -> None:
        """End all processes."""
        restarts = [slot.restarting for slot in self._slots if slot.restarting is not None]
        for task in restarts:
            task.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)
        replicas = [slot.replica for slot in self._slots]
        await asyncio.gather(*(replica.stop() for replica in replicas if replica.is_open))

    def on_report(self, report: StepReport) -> None:
        self._listener.on_report(report)

    def on_refused(self, sequence_id: str, error: Exception) -> None:
        self._listener.on_refused(sequence_id, error)

    def on_stuck(self, replica: Replica, trouble: str) -> None:
        if self._relaunch is None:
            self._listener.on_stuck(replica, trouble)
        else:
            replica.give_up(trouble)

    def on_dead(self, replica: Replica, reason: str) -> None:
        slot = self._slots[replica.index]
        if self._relaunch is None:
            logger.error("%s", reason)
            slot.end = reason
            self.death = self.death or reason
        else:
            self._restart_later(slot, reason)
        self._listener.on_lost(replica, reason)
        if self._relaunch is None:
            for other in self.living:
                other.give_up(reason)

    def _restart_later(self, slot: _Slot, reason: str) -> None:
        """Restart when the policy says so, or give up."""
        index = slot.replica.index
        delay = slot.policy.failed(time.monotonic())
        if delay is not None:
            logger.error("replica %d: %s; restarting it in %g s", index, reason, delay)
            slot.restarting = asyncio.create_task(self._restart(slot, delay))
            return
        slot.end = f"failed too often to be restarted, at last since {reason}"
        logger.critical("replica %d %s", index, slot.end)
        if slot.replica.is_open:
            slot.restarting = asyncio.create_task(slot.replica.kill())
        if all(slot.end is not None for slot in self._slots):
            self.death = f"every replica failed too often; the last one since {reason}"

    async def _restart(self, slot: _Slot, delay: float) -> None:
        assert self._relaunch is not None
        index = slot.replica.index
        if slot.replica.is_open:
            await slot.replica.kill()
        await asyncio.sleep(delay)
        try:
            client, ready = await self._relaunch(index)
        except Exception as error:
            self._restart_later(slot, f"it could not be started: {error}")
            if self.death is not None:
                self._listener.on_lost(slot.replica, self.death)
            return
        slot.take(Replica(index, client, ready, self))
        logger.warning("replica %d serves again", index)
        self._listener.on_restarted()
