"""Signs of life of the engine process: that it lives, and how its step goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from atom.model_engine import wire

HEARTBEAT_SECONDS = 1.0

# Kernels that are compiled when they are first needed, and long contexts, take their time.
MIN_STEP_SECONDS = 60.0
# How much slower than any before it a step may be and still count as one that goes on.
SLACK = 10.0
# The speed is that of steps with so many tokens: small ones take their time whatever they hold.
MIN_PACE_TOKENS = 64
# While no such step was seen.
UNKNOWN_TOKEN_SECONDS = 0.01


class StepPace:
    """How long a step may take, by its tokens and by what the steps before it took."""

    def __init__(self) -> None:
        self._token_seconds: float | None = None

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take note of a step that has ended."""
        if num_tokens >= MIN_PACE_TOKENS:
            self._token_seconds = max(self._token_seconds or 0.0, seconds / num_tokens)

    def allowed_seconds(self, num_tokens: int) -> float:
        slowest = UNKNOWN_TOKEN_SECONDS if self._token_seconds is None else self._token_seconds
        return MIN_STEP_SECONDS + SLACK * slowest * num_tokens


class Heart:
    """Sends a `Heartbeat` about every second from a thread of its own, until `stop`.

    A process that is stopped, or swapped out, falls silent; one that is busy with a long step
    does not, and says how long the step has taken.

    Args:
        socket: used by nothing else.
        count_tokens: tokens of the step under way.
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
        """Work that counts as a step while it lasts."""
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
