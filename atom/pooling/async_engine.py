"""A `PoolingEngine` for the requests of an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from atom.config import EngineConfig
from atom.messages import EngineDeadError
from atom.model_engine.admission import NO_LIMITS, Admission, AdmissionLimits
from atom.model_engine.async_engine import EngineShuttingDownError
from atom.pooling.engine import PoolingEngine, Rows
from atom.pooling.inputs import PoolingInput
from atom.pooling.source import PoolingSource

_DRAIN_POLL_SECONDS = 0.02


class AsyncPoolingEngine:
    """Create with `start`, end with `shutdown`. Not thread-safe: use it from one event loop.

    Attributes:
        engine: what computes.
    """

    def __init__(self, engine: PoolingEngine, admission: AdmissionLimits = NO_LIMITS) -> None:
        self.engine = engine
        self._admission = Admission(admission)
        self._num_unfinished = 0
        self._is_closing = False

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        source: PoolingSource,
        *,
        admission: AdmissionLimits = NO_LIMITS,
    ) -> AsyncPoolingEngine:
        """Load the model.

        Args:
            admission: what may wait beside the request that is computed.

        Raises:
            ConfigError, WeightError: when an option or the checkpoint is wrong.
        """
        return cls(await asyncio.to_thread(PoolingEngine, config, source), admission)

    @property
    def model_name(self) -> str:
        return self.engine.model_name

    @property
    def trouble(self) -> str | None:
        """Why nothing is computed; None while it is."""
        return self.engine.death

    async def compute(self, inputs: Sequence[PoolingInput], client: str = "") -> Rows:
        """A row for each input; cancelling gives up those that wait.

        Args:
            client: the name of its API key; keys take turns.

        Raises:
            RequestFailedError: when an input could not be computed.
            QueueFullError: when more would wait than may.
            EngineDeadError: when the engine is dead, dies, or shuts down.
        """
        if self._is_closing:
            raise EngineShuttingDownError("the engine is shutting down")
        if self.trouble is not None:
            raise EngineDeadError(self.trouble)
        num_tokens = sum(len(each.token_ids) for each in inputs)
        num_waiting = self._num_unfinished - 1
        with self._admission.admit(client, 1, num_tokens, num_waiting):
            self._num_unfinished += 1
            try:
                return await asyncio.wrap_future(self.engine.submit(inputs, client))
            except asyncio.CancelledError:
                if self.trouble is not None:
                    raise EngineDeadError(self.trouble) from None
                if self._is_closing:
                    raise EngineShuttingDownError("the engine is shutting down") from None
                raise
            finally:
                self._num_unfinished -= 1

    async def wait_dead(self) -> str:
        """Wait until nothing is computed any more; returns the reason."""
        await asyncio.shield(asyncio.wrap_future(self.engine.ended))
        return self.trouble or "the engine was shut down"

    async def shutdown(self, drain_seconds: float) -> None:
        """Refuse new requests, wait up to `drain_seconds` for those there are, then end."""
        self._is_closing = True
        deadline = time.monotonic() + drain_seconds
        while self._num_unfinished and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        await asyncio.to_thread(self.engine.shutdown)
