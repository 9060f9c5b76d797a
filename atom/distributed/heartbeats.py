"""What ranks tell each other about themselves, and what is made of their silence."""

from __future__ import annotations

import hmac
import os
import socket
import time
from dataclasses import dataclass
from typing import Literal

import msgspec

from atom.distributed.stages import Stage

BEAT_SECONDS = 0.5
# A rank that is silent for so long is stopped, or its machine is gone. Loading, and the compilers
# that its first step calls, may keep the GIL for a while.
SILENCE_SECONDS = 10.0
FIRST_STEP_SECONDS = 60.0
# After so long, a process of this machine is asked whether it is stopped.
STOPPED_SECONDS = 4.0
# A rank that has not come to rank 0's step, or stage of the start, for so long is named in the log.
BEHIND_SECONDS = 30.0
# Until the first sign of life.
CONNECT_SECONDS = 60.0
# How often a watching thread wakes up, and when it has to assume that it was stopped itself.
TURN_SECONDS = 0.1
STALL_SECONDS = 1.0
# After a failure: how long others are waited for that may have caused it.
SETTLE_SECONDS = 0.3
# For the last messages, when a rank ends.
LINGER_MS = 2000


def longest_silence(num_steps: int) -> float:
    """How long a rank that has begun so many steps may be silent, in seconds."""
    return SILENCE_SECONDS if num_steps > 1 else FIRST_STEP_SECONDS


def describe_silence(num_steps: int) -> str:
    return f"is silent for {longest_silence(num_steps):g} s (stopped, or its machine is gone)"


def describe_stop() -> str:
    return f"is silent for {STOPPED_SECONDS:g} s, since its process is stopped"


class WatchAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where rank 0 listens, and the random bytes that its ranks prove themselves by; secret."""

    endpoint: str
    token: bytes

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> WatchAddress:
        return msgspec.json.decode(data, type=cls)


class Sender(msgspec.Struct, frozen=True):
    """Who sends."""

    rank: int
    pid: int
    host: str
    token: bytes

    @classmethod
    def here(cls, rank: int, token: bytes) -> Sender:
        return cls(rank, os.getpid(), socket.gethostname(), token)


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """`step` is how many steps the rank has begun, `stage` where its start is."""

    sender: Sender
    step: int
    stage: Stage


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The rank ends as it should."""

    sender: Sender


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank ends; `cause` is the rest of a sentence, such as `raised ValueError: ...`."""

    sender: Sender
    cause: str


Message = Heartbeat | Goodbye | RankFailed
encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(data: bytes, token: bytes) -> Message | None:
    """None when it does not come from a rank of the group."""
    try:
        message = _decoder.decode(data)
    except msgspec.DecodeError:
        return None
    return message if hmac.compare_digest(message.sender.token, token) else None


How = Literal["died", "silent", "raised"]


@dataclass(frozen=True)
class RankFailure:
    """Why a rank is lost.

    Attributes:
        pid, host: None if the rank has never been heard of.
        how: `died`: its process has ended. `silent`: it may be stopped, and its process still there
            (one that `is_local` can be killed by its pid). `raised`: it said so itself.
        cause: the rest of the sentence, such as `was killed by signal 9`.
    """

    rank: int
    pid: int | None
    host: str | None
    how: How
    cause: str
    is_local: bool

    @classmethod
    def of(
        cls, rank: int, sender: Sender | None, local_pid: int | None, how: How, cause: str
    ) -> RankFailure:
        """From what is known of the rank: a message of it, its pid if it is on this machine."""
        pid = sender.pid if local_pid is None and sender is not None else local_pid
        host = None if sender is None else sender.host
        return cls(rank, pid, host, how, cause, is_local=local_pid is not None)

    def describe(self) -> str:
        """One line: `rank 2 (pid 4711 on host a) was killed by signal 9`."""
        if self.pid is None:
            return f"rank {self.rank} {self.cause}"
        place = "" if self.host is None else f" on host {self.host}"
        return f"rank {self.rank} (pid {self.pid}{place}) {self.cause}"


class Turns:
    """Tells whether the calling thread has run all the time.

    When it was not scheduled, or the machine was suspended, silence of others means nothing.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()

    def next(self) -> tuple[float, bool]:
        """The time now, and whether this thread has missed turns since the last call."""
        now = time.monotonic()
        stalled = now - self._last > STALL_SECONDS
        self._last = now
        return now, stalled
