"""What the engine and the process that tries grammars say to each other: msgpack in frames.

A frame is four bytes of length, big-endian, and that many bytes.
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
    """What a trial may take.

    Attributes:
        seconds: from when it is asked for to its end, waiting included. Ordinary grammars take
            10 to 500 ms; a schema of 16 kB full of patterns takes 5 s with 49k tokens and up to
            30 s with 128k.
        slices: of processor time, in seconds. What takes more than the first begins anew among
            those that have the second, and so on; behind the last one nothing but the deadline
            ends a trial, and it counts as slow.
        memory_bytes: beyond what the process has before the trial; that schema takes 100 MB.
        places: trials at once with each of the slices, and without.
    """

    seconds: float = 30.0
    slices: tuple[float, ...] = (0.1, 0.5)
    memory_bytes: int = 512 << 20
    places: int = 2

    def is_slow(self, seconds: float) -> bool:
        """Whether a grammar that took so much processor time is."""
        return seconds > self.slices[-1]


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message."""

    vocabulary: Vocabulary
    limits: TrialLimits


class Try(msgspec.Struct, frozen=True, tag=True):
    """Compile a grammar; a `Verdict` of that id follows, unless it is cancelled."""

    id: int
    wanted: StructuredOutput


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the trial any more. One that is over is no error."""

    id: int


ToTrials = Setup | Try | Cancel


class Verdict(msgspec.Struct, frozen=True):
    """How a trial ended.

    Attributes:
        seconds: of processor time that compiling took; 0 where it failed.
        error: why the grammar cannot be used, for the user; empty when it can.
        was_stopped: whether that is for lack of time or memory, and not the grammar's fault.
    """

    id: int
    seconds: float = 0.0
    error: str = ""
    was_stopped: bool = False


def encode_frame(message: ToTrials | Verdict) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class FrameReader:
    """Puts frames together from the pieces that a pipe gives."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Whole frames, as far as the pieces go."""
        self._data += piece
        while len(self._data) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "big")
            if len(self._data) < end:
                return
            frame = bytes(self._data[_LENGTH_BYTES:end])
            del self._data[:end]
            yield frame
