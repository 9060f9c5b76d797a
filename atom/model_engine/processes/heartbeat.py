"""Heartbeats of the engine process, with the progress of its current step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from atom.model_engine.processes import wire

HEARTBEAT_SECONDS = 1.0

# Generous, since kernels may be compiled at first use.
MIN_STEP_SECONDS = 60.0
# How many times slower per token than the slowest step so far a step may be.
SLACK = 10.0
# Smaller steps are not used for the estimate: their time hardly depends on their tokens.
MIN_PACE_TOKENS = 64
# Estimate before the first such step.
UNKNOWN_TOKEN_SECONDS = 0.01


class StepPace:
    """How long a step may take, from its tokens and the slowest step so far."""

    def __init__(self) -> None:
        self._token_seconds: float | None = None

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record a finished step."""
        if num_tokens >= MIN_PACE_TOKENS:
            self._token_seconds = max(self._token_seconds or 0.0, seconds / num_tokens)

    def allowed_seconds(self, num_tokens: int) -> float:
        slowest = UNKNOWN_TOKEN_SECONDS if self._token_seconds is None else self._token_seconds
        return MIN_STEP_SECONDS + SLACK * slowest * num_tokens


class Heart:
    """Sends a `Heartbeat` about every second from a thread of its own, until `stop`.

    If the process is suspended or swapped out, the heartbeats stop. During a long step they go on
    and tell how long it has taken.

    Args:
        socket: used by this thread only.
        count_tokens: returns the number of tokens of the current step.
    """

    def __init__(self, socket: zmq.Socket[bytes], count_tokens: Callable[[], int]) -> None:
        self._socket = socket
        self._count_tokens = count_tokens
        self._pace = StepPace()
        self._step_began: float | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the enclosed step."""
        began = self._step_began = time.monotonic()
        yield
        self._pace.learn(self._count_tokens(), time.monotonic() - began)
        self._step_began = None

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            self._socket.send(wire.encode(wire.Heartbeat(self._progress())))

    def _progress(self) -> wire.StepProgress | None:
        began = self._step_began
        if began is None:
            return None
        num_tokens = self._count_tokens()
        seconds = time.monotonic() - began
        return wire.StepProgress(num_tokens, seconds, self._pace.allowed_seconds(num_tokens))
