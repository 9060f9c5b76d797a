"""One engine process as its frontend sees it: what it was sent, and how it fares."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from atom.messages import EngineDeadError, EngineRequest, RequestRefusedError, StepReport
from atom.model_engine.processes import wire
from atom.model_engine.processes.engine_client import EngineClient
from atom.model_engine.replicas.flight_recorder import FlightRecorder

logger = logging.getLogger(__name__)

# The engine process sends a heartbeat about every second, even during a long step.
SILENT_SECONDS = 10.0
# After this time without an answer, the engine is given up.
GIVE_UP_SECONDS = 20.0
_WATCH_SECONDS = 1.0


class ReplicaListener(Protocol):
    """Called from the event loop with what a replica says and suffers."""

    def on_report(self, report: StepReport) -> None: ...

    def on_refused(self, sequence_id: str, error: Exception) -> None: ...

    def on_stuck(self, replica: Replica, trouble: str) -> None:
        """It has not answered for too long; called every second while that is so."""

    def on_dead(self, replica: Replica, reason: str) -> None:
        """It has ended; called once."""


class Replica:
    """An engine process from its readiness to its end.

    Attributes:
        index: its place among the replicas.
        limits: what a request must fit in.
        stats: the last reported engine state, at most about a second old.
        num_sequences: those that were sent and have not ended.
        death: why it has ended; None while it lives.
    """

    def __init__(
        self, index: int, client: EngineClient, ready: wire.Ready, listener: ReplicaListener
    ) -> None:
        self.index = index
        self.limits = ready.limits
        self.stats = ready.stats
        self.num_sequences = 0
        self.death: str | None = None
        self._client = client
        self._listener = listener
        self._queued: list[EngineRequest] = []
        # Counted in ticks of `_watch`, not in seconds: if this process was blocked, the engine's
        # messages are still unread, which does not mean that it was silent.
        self._num_silent = 0
        self._num_stuck = 0
        self._step: wire.StepProgress | None = None
        self._flight = FlightRecorder(ready.stats)
        self._reader = asyncio.create_task(self._read())
        self._watcher = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._client.pid

    @property
    def is_open(self) -> bool:
        """Whether `stop` or `kill` must still be called."""
        return self._client.is_open

    @property
    def trouble(self) -> str | None:
        """Why the engine is not expected to answer; None when it is healthy.

        It has died, or sent no message for 10 seconds, or its current step takes longer than
        `StepPace` allows for its number of tokens.
        """
        if self.death is not None:
            return self.death
        if not self._client.is_alive:
            return "the engine process has ended"
        if self._num_silent * _WATCH_SECONDS >= SILENT_SECONDS:
            return "the engine process is silent"
        if self._step is not None and self._step.is_overdue:
            return (
                f"the engine's step of {self._step.num_tokens} tokens has taken "
                f"{self._step.seconds:.0f} s, more than {self._step.allowed_seconds:.0f} s"
            )
        return None

    def add(self, requests: list[EngineRequest]) -> None:
        """Send at the next event loop iteration, in one message with requests added until then."""
        if not self._queued:
            asyncio.get_running_loop().call_soon(self._send_queued)
        self._queued += requests

    def abort(self, sequence_ids: list[str]) -> None:
        self._send_queued()  # an abort must not overtake its request
        if sequence_ids and self._client.is_open:
            self._client.send(wire.Abort(sequence_ids))

    def give_up(self, reason: str) -> None:
        """Take it for dead, whatever it may yet say."""
        self._reader.cancel()
        self._die(reason)

    async def stop(self) -> None:
        """Let the process end, or end it."""
        self._cancel()
        await self._client.stop()

    async def kill(self) -> None:
        self._cancel()
        await self._client.kill()

    def _cancel(self) -> None:
        self._reader.cancel()
        self._watcher.cancel()

    def _send_queued(self) -> None:
        queued, self._queued = self._queued, []
        if queued and self._client.is_open:
            self._client.send(wire.AddRequests.of(queued))

    async def _read(self) -> None:
        """Receive messages from the engine until it is dead."""
        try:
            while self.death is None:
                messages = await self._client.receive()
                self._num_silent = 0
                for message in messages:
                    self._handle(message)
        except EngineDeadError as error:
            self._die(str(error))
        except Exception as error:
            logger.exception("cannot go on reading from the engine")
            self._die(f"{type(error).__name__}: {error}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self._num_silent += 1
            trouble = self.trouble
            if trouble is None:
                self._num_stuck = 0
                continue
            if not self._num_stuck:
                logger.error("replica %d: %s", self.index, trouble)
            self._num_stuck += 1
            if self._num_stuck * _WATCH_SECONDS > GIVE_UP_SECONDS:
                self._listener.on_stuck(self, trouble)

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Step(report):
                self._step = None
                if report.stats is not None:
                    self.stats = report.stats
                self._flight.note(report)
                self._listener.on_report(report)
            case wire.Heartbeat(step):
                self._step = step
            case wire.RequestRefused(sequence_id, text, param):
                self._listener.on_refused(sequence_id, RequestRefusedError(text, param))
            case wire.EngineFailed(text):
                self._die(f"the engine failed: {text}")
            case wire.Found() | wire.Ready() | wire.StartupFailed():
                raise TypeError("the engine was ready already")

    def _die(self, reason: str) -> None:
        """Only the first call has an effect."""
        if self.death is not None:
            return
        self.death = reason
        self._watcher.cancel()
        if (path := self._flight.write(reason, self.pid, self._step)) is not None:
            logger.error("the engine's last steps are shown by: atom flight %s", path)
        self._listener.on_dead(self, reason)
