"""Rank 0 notices within seconds that another rank is dead, stopped or has raised, and why; the
others notice that rank 0 is gone.

    watch = RankWatch(master_addr, ranks=[1, 2, 3], on_failure=..., local_pids={1: 4711})
    store.set("watch", watch.address.encode())
    ...
    watch.close()               # the other ranks are told that all is over
    watch.close("why I fail")   # or that rank 0 has failed

And in each of the others:

    reporter = RankReporter(WatchAddress.decode(store.get("watch")), rank, on_rank0_gone=...)
    try:
        ...
    except Exception as error:
        reporter.failed(f"{type(error).__name__}: {error}")
    else:
        reporter.close()

Both ends send heartbeats from threads that do nothing else: a rank is not lost because it is busy,
unless something holds the GIL.

One failure makes others, such as collectives that raise when a peer is gone. So ranks have
`SETTLE_SECONDS` to show theirs, and a rank that ended without a word counts as the cause.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import zmq

from atom.distributed import heartbeats
from atom.distributed.channel import ChannelError
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
from atom.distributed.stages import Stage, Stages
from atom.distributed.tcp_socket import bind_tcp, close_socket, create_socket

logger = logging.getLogger(__name__)

# A connection that breaks for other reasons is back by then.
_RECONNECT_SECONDS = 1.5
# A rank that said why it failed is rather a victim than one that could not.
_LIKELY_CAUSES: tuple[How, ...] = ("died", "silent", "raised")


@dataclass
class _Rank:
    """What rank 0 knows about a rank: it has to be heard again before `deadline`.

    Attributes:
        behind_since: when it was first seen at `stage` and `step` while rank 0 had begun a later
            one.
    """

    rank: int
    deadline: float
    heard_at: float
    process: LocalProcess | None
    sender: Sender | None = None
    identity: bytes | None = None
    step: int = 0
    stage: Stage = field(default_factory=Stage)
    behind_since: float | None = None
    was_named: bool = False
    has_left: bool = False

    def is_stopped(self, now: float) -> bool:
        is_silent = now - self.heard_at >= heartbeats.STOPPED_SECONDS
        return is_silent and self.process is not None and self.process.is_stopped

    def fail(self, how: How, cause: str) -> RankFailure:
        pid = self.process.pid if self.process else None
        return RankFailure.of(self.rank, self.sender, pid, how, cause)


class RankWatch:
    """Watches `ranks` from a thread of its own until `close`.

    Args:
        host: a name or address of this machine that the ranks can reach.
        on_failure: called once, by that thread, with the first failure.
        local_pids: of the ranks on this machine, whose end is noticed at once.
        count_steps: how many steps rank 0 has begun.
        stages: of rank 0's start.
        connect_s: how long a rank may take until its first heartbeat.

    Raises:
        ChannelError: when no port of `host` can be bound.
    """

    def __init__(
        self,
        host: str,
        ranks: Iterable[int],
        on_failure: Callable[[RankFailure], None],
        *,
        local_pids: Mapping[int, int] | None = None,
        count_steps: Callable[[], int] = lambda: 0,
        stages: Stages | None = None,
        connect_s: float = CONNECT_SECONDS,
    ) -> None:
        self._on_failure = on_failure
        self._count_steps = count_steps
        self._stages = stages or Stages()
        self._connect_s = connect_s
        self._socket = create_socket(zmq.ROUTER)
        try:
            endpoint = bind_tcp(self._socket, host)
        except ChannelError:
            close_socket(self._socket, 0)
            raise
        self.address = WatchAddress(endpoint, secrets.token_bytes(16))
        self._me = Sender.here(0, self.address.token)
        now, pids = time.monotonic(), local_pids or {}
        self._ranks = {
            rank: _Rank(
                rank, now + connect_s, now, LocalProcess(pids[rank]) if rank in pids else None
            )
            for rank in ranks
        }
        self._failures: dict[int, RankFailure] = {}
        self._decide_at: float | None = None
        self._failure: RankFailure | None = None
        self._last_words: Message = Goodbye(self._me)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> RankFailure | None:
        """What `on_failure` was called with."""
        return self._failure

    @property
    def steps(self) -> dict[int, int]:
        """How many steps each rank had begun at its last heartbeat."""
        return {rank.rank: rank.step for rank in self._ranks.values()}

    @property
    def awaited(self) -> list[str]:
        """What each rank does that has not come to rank 0's stage of the start, one phrase each."""
        own = self._stages.current
        late = [each for each in self._ranks.values() if each.stage.number < own.number]
        return [f"rank {each.rank} is {each.stage.what}" for each in late]

    def close(self, cause: str | None = None) -> None:
        """Tell the other ranks that rank 0 ends, because of `cause` or as it should."""
        if cause is not None:
            self._last_words = RankFailed(self._me, f"has ended: {cause}")
        self._stopping.set()
        if threading.current_thread() is not self._thread:  # but called by `on_failure`
            self._thread.join()

    def _run(self) -> None:
        turns, next_beat = Turns(), 0.0
        while not self._stopping.is_set():
            self._socket.poll(int(1000 * TURN_SECONDS))
            now, stalled = turns.next()
            if stalled:
                self._start_anew(now)
            self._receive(now)
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._send(self._beat(), now)
            for rank in self._ranks.values():
                self._check(rank, now)
            if self._decide_at is not None and now >= self._decide_at:
                self._decide(now)
        self._send(self._last_words, time.monotonic())
        close_socket(self._socket, LINGER_MS)
        for rank in self._ranks.values():
            if rank.process is not None:
                rank.process.close()

    def _start_anew(self, now: float) -> None:
        """This thread did not run for a while: perhaps the others did not either."""
        for rank in self._ranks.values():
            rank.deadline = max(rank.deadline, now + longest_silence(rank.step))
            rank.heard_at = now

    def _receive(self, now: float) -> None:
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode(b"".join(frames), self.address.token)
            if message is None or message.sender.rank not in self._ranks:
                logger.warning("%s got bytes that no rank sends; ignored", self.address.endpoint)
                continue
            self._handle(self._ranks[message.sender.rank], identity, message, now)

    def _handle(self, rank: _Rank, identity: bytes, message: Message, now: float) -> None:
        rank.sender = message.sender
        match message:
            case Heartbeat(step=step):
                self._note_progress(rank, message, now)
                rank.identity, rank.heard_at = identity, now
                rank.deadline = now + longest_silence(step)
            case Goodbye():
                rank.has_left = True
                self._failures.pop(rank.rank, None)
            case RankFailed(cause=cause):
                rank.has_left = True
                self._note(rank.fail("raised", cause), now)

    def _note_progress(self, rank: _Rank, beat: Heartbeat, now: float) -> None:
        """Name a rank in the log, once, that does not come to rank 0's stage or step."""
        own, step = self._stages.current, self._count_steps()
        is_behind = (beat.stage.number, beat.step) < (own.number, step)
        if not is_behind or (beat.stage, beat.step) != (rank.stage, rank.step):
            rank.behind_since, rank.was_named = None, False
        elif rank.behind_since is None:
            rank.behind_since = now
        elif not rank.was_named and now - rank.behind_since > heartbeats.BEHIND_SECONDS:
            rank.was_named = True
            theirs, ours = f"has begun {beat.step} steps", str(step)
            if beat.stage.number < own.number:
                theirs, ours = f"is {beat.stage.what}", f"is {own.what}"
            logger.warning(
                "rank %d (pid %d on host %s) is behind: it %s, and rank 0 %s, for %.0f s",
                *(rank.rank, beat.sender.pid, beat.sender.host, theirs, ours),
                now - rank.behind_since,
            )
        rank.step, rank.stage = beat.step, beat.stage

    def _beat(self) -> Heartbeat:
        return Heartbeat(self._me, self._count_steps(), self._stages.current)

    def _send(self, message: Message, now: float) -> None:
        for rank in self._ranks.values():
            if rank.identity is None:
                continue
            try:
                self._socket.send_multipart([rank.identity, encode(message)])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                rank.identity = None
                rank.deadline = min(rank.deadline, now + _RECONNECT_SECONDS)

    def _check(self, rank: _Rank, now: float) -> None:
        if rank.has_left or rank.rank in self._failures:
            return
        if rank.process is not None and rank.process.has_ended:
            self._note(rank.fail("died", rank.process.describe_exit()), now)
        elif rank.is_stopped(now):
            self._note(rank.fail("silent", describe_stop()), now)
        elif now >= rank.deadline:
            self._note(self._describe_silence(rank), now)

    def _describe_silence(self, rank: _Rank) -> RankFailure:
        if rank.sender is None:
            return rank.fail("silent", f"has not connected within {self._connect_s:g} s")
        if rank.identity is None:
            return rank.fail("died", "has lost its connection without a word: its process is gone")
        return rank.fail("silent", describe_silence(rank.step))

    def _note(self, failure: RankFailure, now: float) -> None:
        self._failures[failure.rank] = failure
        if self._decide_at is None:
            self._decide_at = now + SETTLE_SECONDS

    def _decide(self, now: float) -> None:
        """Choose the failure that has most likely caused the others."""
        self._send(self._beat(), now)
        for rank in self._ranks.values():
            is_lost = rank.sender is not None and rank.identity is None
            if self._failures and is_lost and not rank.has_left:
                self._failures.setdefault(rank.rank, self._describe_silence(rank))
        self._decide_at = None
        if self._failure is not None or not self._failures:
            return
        self._failure = min(
            self._failures.values(), key=lambda failure: _LIKELY_CAUSES.index(failure.how)
        )
        for failure in self._failures.values():
            logger.error("%s", failure.describe())
        try:
            self._on_failure(self._failure)
        except Exception:
            logger.exception("what was to be done about a lost rank failed")


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
