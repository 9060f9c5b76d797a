"""Messages between engine and trial process: msgpack in frames.

A frame is a big-endian length of four bytes, followed by as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from atom.structured_output.params import StructuredOutput
from atom.structured_output.vocabulary import Vocabulary

TOO_MANY = "too many grammars wait to be compiled; try again later"
TOO_LONG = "compiling it takes too long; make it smaller, or ask for fewer repetitions"
_LENGTH_BYTES = 4


class TrialLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a trial.

    Attributes:
        seconds: from submission to the end, including waiting. Ordinary grammars take 10 to 500 ms;
            a schema of 16 kB full of patterns takes 5 s with 49k tokens and up to 30 s with 128k.
        slices: processor time in seconds on each level. A trial that exceeds its slice is restarted
            on the next level. On the last level, after all slices, it is only ended by the deadline
            and counts as slow.
        memory_bytes: beyond the memory of the process before the trial; that schema takes 100 MB.
        places: concurrent trials per level.
    """

    seconds: float = 30.0
    slices: tuple[float, ...] = (0.1, 0.5)
    memory_bytes: int = 512 << 20
    places: int = 2

    def is_slow(self, seconds: float) -> bool:
        """Whether a grammar with this compile time counts as slow."""
        return seconds > self.slices[-1]


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message."""

    vocabulary: Vocabulary
    limits: TrialLimits


class Try(msgspec.Struct, frozen=True, tag=True):
    """Compile a grammar; answered by a `Verdict` with this id, unless it is cancelled."""

    id: int
    wanted: StructuredOutput


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a trial; ignored if it has ended."""

    id: int


ToTrials = Setup | Try | Cancel


class Verdict(msgspec.Struct, frozen=True):
    """The result of a trial.

    Attributes:
        seconds: processor time of the compilation; 0 if it failed.
        error: why the grammar cannot be used, for the user; empty if it can.
        was_stopped: whether it was stopped (time, memory, process), so that a retry may succeed.
    """

    id: int
    seconds: float = 0.0
    error: str = ""
    was_stopped: bool = False


def encode_frame(message: ToTrials | Verdict) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class FrameReader:
    """Reassembles frames from the data read from a pipe."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The frames that are complete now."""
        self._data += piece
        while len(self._data) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "big")
            if len(self._data) < end:
                return
            frame = bytes(self._data[_LENGTH_BYTES:end])
            del self._data[:end]
            yield frame
