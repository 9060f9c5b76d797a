"""The side of ranks other than 0: they say that they live, and notice that rank 0 is gone.

reporter = RankReporter(WatchAddress.decode(store.get("watch")), rank, on_rank0_gone=...)
try:
    ...
except Exception as error:
    reporter.failed(f"{type(error).__name__}: {error}")
else:
    reporter.close()
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from atom.distributed import heartbeats
from atom.distributed.heartbeats import (
    BEAT_SECONDS,
    CONNECT_SECONDS,
    LINGER_MS,
    SETTLE_SECONDS,
    TURN_SECONDS,
    Goodbye,
    Heartbeat,
    How,
    Message,
    RankFailed,
    RankFailure,
    Sender,
    Turns,
    WatchAddress,
    decode,
    describe_silence,
    describe_stop,
    encode,
    longest_silence,
)
from atom.distributed.local_process import LocalProcess
from atom.distributed.stages import Stages
from atom.distributed.tcp_socket import close_socket, create_socket

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Gone:
    """Rank 0 has failed, or ended as it should (None)."""

    failure: RankFailure | None


class RankReporter:
    """Reports to rank 0's `RankWatch` from a thread of its own until `failed` or `close`.

    Args:
        on_rank0_gone: called once, by that thread, with the failure of rank 0, or with None when
            it ended as it should.
        rank0_pid: if rank 0 is on this machine; its end is noticed at once.
        count_steps: how many steps this rank has begun.
        stages: of its start.
    """

    def __init__(
        self,
        address: WatchAddress,
        rank: int,
        on_rank0_gone: Callable[[RankFailure | None], None],
        *,
        rank0_pid: int | None = None,
        count_steps: Callable[[], int] = lambda: 0,
        stages: Stages | None = None,
    ) -> None:
        self._address = address
        self._me = Sender.here(rank, address.token)
        self._on_rank0_gone = on_rank0_gone
        self._count_steps = count_steps
        self._stages = stages or Stages()
        self._rank0 = LocalProcess(rank0_pid) if rank0_pid is not None else None
        self._rank0_ended_at: float | None = None
        self._rank0_sender: Sender | None = None
        self._rank0_step = 0
        self._heard_at = time.monotonic()
        self._deadline = self._heard_at + CONNECT_SECONDS
        self._last_words: Message = Goodbye(self._me)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-reporter", daemon=True)
        self._thread.start()

    def failed(self, cause: str) -> None:
        """Tell rank 0 why this rank ends, such as `ValueError: ...`, and stop reporting."""
        self._last_words = RankFailed(self._me, f"raised {cause}")
        self.close()

    def close(self) -> None:
        """Say goodbye, unless this rank has `failed`, and stop reporting."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:  # but called by `on_rank0_gone`
            self._thread.join()

    def _run(self) -> None:
        socket = create_socket(zmq.DEALER)
        socket.connect(self._address.endpoint)
        gone = self._report(socket)
        if gone is None:
            socket.send(encode(self._last_words))
        close_socket(socket, LINGER_MS if gone is None else 0)
        if self._rank0 is not None:
            self._rank0.close()
        if gone is not None:
            self._tell(gone.failure)

    def _report(self, socket: zmq.Socket[bytes]) -> _Gone | None:
        """Send heartbeats until told to stop (None), or until rank 0 is gone."""
        turns, next_beat = Turns(), 0.0
        while not self._stopping.is_set():
            now, stalled = turns.next()
            if stalled:
                self._deadline = max(self._deadline, now + longest_silence(self._rank0_step))
                self._heard_at = now
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                beat = Heartbeat(self._me, self._count_steps(), self._stages.current)
                socket.send(encode(beat))
            if (gone := self._listen(socket, now) or self._check(now)) is not None:
                return gone
            socket.poll(int(1000 * TURN_SECONDS))
        return None

    def _listen(self, socket: zmq.Socket[bytes], now: float) -> _Gone | None:
        while True:
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            message = decode(data, self._address.token)
            if message is None:
                logger.warning("%s sent what rank 0 never does; ignored", self._address.endpoint)
                continue
            self._rank0_sender = message.sender
            self._heard_at = now
            match message:
                case Heartbeat(step=step):
                    self._rank0_step = step
                    self._deadline = now + longest_silence(step)
                case Goodbye():
                    return _Gone(None)
                case RankFailed(cause=cause):
                    return self._fail("raised", cause)

    def _check(self, now: float) -> _Gone | None:
        if self._rank0 is not None and self._rank0.has_ended:
            if self._rank0_ended_at is None:
                self._rank0_ended_at = now  # its last words may still come
            elif now >= self._rank0_ended_at + SETTLE_SECONDS:
                return self._fail("died", self._rank0.describe_exit())
        is_silent = now - self._heard_at >= heartbeats.STOPPED_SECONDS
        if is_silent and self._rank0 is not None and self._rank0.is_stopped:
            return self._fail("silent", describe_stop())
        if now < self._deadline:
            return None
        if self._rank0_sender is None:
            return self._fail("silent", f"was not heard of for {CONNECT_SECONDS:g} s")
        return self._fail("silent", describe_silence(self._rank0_step))

    def _fail(self, how: How, cause: str) -> _Gone:
        pid = self._rank0.pid if self._rank0 else None
        return _Gone(RankFailure.of(0, self._rank0_sender, pid, how, cause))

    def _tell(self, failure: RankFailure | None) -> None:
        if failure is not None:
            logger.error("%s", failure.describe())
        try:
            self._on_rank0_gone(failure)
        except Exception:
            logger.exception("what was to be done when rank 0 is gone failed")
