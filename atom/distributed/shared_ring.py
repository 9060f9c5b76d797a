"""A broadcast through shared memory: one writer, several readers, each reads everything.

The segment has a header, a line per reader and `NUM_SLOTS` slots. A piece of a message is written
once, to slot `number % NUM_SLOTS`, when every reader is done with the slot's last piece.

Nothing is locked. Processors other than x86 may show stores in another order than they were made,
so a piece carries a checksum of its number, size and bytes: a reader takes it when the checksum is
right, and only then says that it is done. What a reader says is stored with its complement.

A reader that waits spins for an instant, then says that it sleeps until the writer rings its bell.
If the writer does not see that in time, the reader wakes up by itself a little later.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Sequence

from atom.distributed.channel import (
    NAP_SECONDS,
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    Wait,
)
from atom.distributed.doorbell import Doorbell, Sleeper
from atom.distributed.shared_memory import SharedMemory, open_shared_memory

NUM_SLOTS = 16
PIECE_BYTES = 65536 - 64

# Places in 8-byte words. Lines of 64 bytes keep what two processes write apart.
_LINE = 8
_TOKEN = 0  # 2 words
_END = _LINE  # 1 + the number of pieces, once the writer has closed
_READERS = 2 * _LINE
# In a reader's line
_DONE, _DONE_COMPLEMENT, _PID, _HAS_LEFT, _BELL, _SLEEPS = range(6)
# In a slot's first line
_NUMBER, _SIZE, _CHECKSUM = range(3)
_SLOT = _LINE + PIECE_BYTES // 8
_MASK = (1 << 64) - 1
# Reading a slot while it is written shows a wrong checksum for an instant.
_MOST_BAD_CHECKSUMS = 1000


def _segment_bytes(num_readers: int) -> int:
    words = _READERS + num_readers * _LINE + NUM_SLOTS * _SLOT
    return -(-8 * words // mmap.PAGESIZE) * mmap.PAGESIZE


def _checksum(number: int, size: int, piece: bytes | memoryview) -> int:
    return zlib.crc32(piece, zlib.crc32(struct.pack("<QQ", number, size)))


class _Segment:
    """Words and bytes of the mapped memory. Sizes count bytes twice, plus 1 if more follow."""

    def __init__(self, memory: mmap.mmap, num_readers: int) -> None:
        self.bytes = memoryview(memory)
        # Native words: one store writes 8 bytes.
        self.words = self.bytes.cast("Q")
        self._first_slot = _READERS + num_readers * _LINE

    def slot(self, number: int) -> int:
        """The first word of the slot of a piece."""
        return self._first_slot + number % NUM_SLOTS * _SLOT

    def release(self) -> None:
        self.words.release()
        self.bytes.release()


class RingWriter:
    """Creates the segment and writes to it.

    Args:
        token: 16 bytes that tell this segment from others.
        ranks: of the readers, by index; for error messages.

    Raises:
        ChannelError: when there is no memory.
    """

    def __init__(self, token: bytes, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self._memory = SharedMemory(_segment_bytes(len(ranks)))
        self._segment = _Segment(self._memory.map, len(ranks))
        self._segment.words[_TOKEN : _TOKEN + 2] = memoryview(token).cast("Q")
        self._lines = [_READERS + index * _LINE for index in range(len(ranks))]
        self._bells = [Doorbell() for _ in ranks]
        for line, bell in zip(self._lines, self._bells, strict=True):
            self._segment.words[line + _BELL] = bell.descriptor
        self._number = 0
        self._done = [0] * len(ranks)

    @property
    def path(self) -> str:
        return self._memory.path

    def unconnected(self) -> list[int]:
        """The ranks that have not opened the segment yet."""
        pids = [self._segment.words[line + _PID] for line in self._lines]
        return [rank for rank, pid in zip(self.ranks, pids, strict=True) if pid == 0]

    def write(self, data: bytes, wait: Wait, closing: threading.Event) -> None:
        """Write a message, of any size, piece by piece.

        Raises:
            ChannelTimeoutError: when a reader does not make room in time.
            ChannelClosedError: when a reader has left, or this side closes meanwhile.
        """
        view = memoryview(data)
        for begin in range(0, max(len(data), 1), PIECE_BYTES):
            piece = view[begin : begin + PIECE_BYTES]
            self._wait_for_room(wait, closing)
            self._write_piece(piece, begin + PIECE_BYTES < len(data))

    def close(self) -> None:
        """Tell the readers, who still get what was written."""
        self._segment.words[_END] = self._number + 1
        self._wake_readers()
        self._segment.release()
        self._memory.close()
        for bell in self._bells:
            bell.close()

    def _write_piece(self, piece: memoryview, more: bool) -> None:
        self._number += 1
        size = 2 * len(piece) + more
        words = self._segment.words
        slot = self._segment.slot(self._number)
        begin = 8 * (slot + _LINE)
        self._segment.bytes[begin : begin + len(piece)] = piece
        words[slot + _SIZE] = size
        words[slot + _CHECKSUM] = _checksum(self._number, size, piece)
        words[slot + _NUMBER] = self._number
        self._wake_readers()

    def _wake_readers(self) -> None:
        words = self._segment.words
        for line, bell in zip(self._lines, self._bells, strict=True):
            if words[line + _SLEEPS]:
                bell.ring()

    def _wait_for_room(self, wait: Wait, closing: threading.Event) -> None:
        wait.restart()
        while True:
            self._read_done()
            if self._number - min(self._done) < NUM_SLOTS:
                return
            if closing.is_set():
                raise ChannelClosedError("the channel was closed while readers were waited for")
            if not wait.pause():
                raise ChannelTimeoutError(self._describe_slowest())
            self._check_alive()

    def _read_done(self) -> None:
        words = self._segment.words
        for index, line in enumerate(self._lines):
            if words[line + _HAS_LEFT]:
                raise ChannelClosedError(f"rank {self.ranks[index]} has left the channel")
            done = words[line + _DONE]
            if done ^ words[line + _DONE_COMPLEMENT] == _MASK:
                self._done[index] = done

    def _check_alive(self) -> None:
        for rank, line, bell in zip(self.ranks, self._lines, self._bells, strict=True):
            if pid := self._segment.words[line + _PID]:
                bell.let_go()
                if bell.is_deserted:
                    raise ChannelClosedError(f"rank {rank} (pid {pid}) has died")

    def _describe_slowest(self) -> str:
        if unconnected := self.unconnected():
            return f"rank {unconnected[0]} has not connected to the channel in time"
        rank = self.ranks[self._done.index(min(self._done))]
        return f"rank {rank} does not read: {NUM_SLOTS} messages wait for it"


class RingReader:
    """Opens a segment and reads all that was ever written to it.

    Args:
        path, token, num_readers: of the writer.
        index: which of the readers this is; each can be opened once.

    Raises:
        ChannelError: when the segment cannot be opened, or this index is taken.
    """

    def __init__(self, path: str, token: bytes, num_readers: int, index: int) -> None:
        self._memory = open_shared_memory(path, _segment_bytes(num_readers))
        self._segment = _Segment(self._memory, num_readers)
        self._line = _READERS + index * _LINE
        self._number = 0
        self._pieces: list[bytes] = []
        self._bad_checksums = 0
        self._writer_lives = True
        try:
            self._sleeper = self._connect(path, token)
        except ChannelError:
            self._disconnect()
            raise

    def read(self, wait: Wait, closing: threading.Event) -> bytes:
        """The next message. After a time-out it can be called again; nothing is lost.

        Raises:
            ChannelTimeoutError: when none comes in time.
            ChannelClosedError: when the writer, or this side, has closed.
        """
        while True:
            if closing.is_set():
                raise ChannelClosedError("the channel was closed while a message was waited for")
            if (size := self._take_piece()) is None:
                if 0 < self._segment.words[_END] <= self._number + 1:
                    raise ChannelClosedError("rank 0 has closed the channel")
                if not self._writer_lives:
                    raise ChannelClosedError("rank 0 has died")
                if wait.is_over:
                    raise ChannelTimeoutError("rank 0 has sent nothing in time")
                if not wait.spin():
                    self._sleep(wait.limit(NAP_SECONDS))
            elif size % 2 == 0:
                message = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
                self._pieces.clear()
                return message
            else:
                wait.restart()

    def close(self) -> None:
        self._segment.words[self._line + _HAS_LEFT] = 1
        self._disconnect()
        self._sleeper.close()

    def _connect(self, path: str, token: bytes) -> Sleeper:
        words = self._segment.words
        if words[_TOKEN : _TOKEN + 2] != memoryview(token).cast("Q"):
            raise ChannelError("the shared memory is that of another channel")
        if pid := words[self._line + _PID]:
            raise ChannelError(f"this rank has opened the channel already, with pid {pid}")
        try:
            sleeper = Sleeper(f"{os.path.dirname(path)}/{words[self._line + _BELL]}")
        except OSError as error:
            raise ChannelError(f"cannot open the doorbell of rank 0: {error}") from error
        words[self._line + _PID] = os.getpid()
        return sleeper

    def _disconnect(self) -> None:
        self._segment.release()
        self._memory.close()

    def _sleep(self, seconds: float) -> None:
        words = self._segment.words
        words[self._line + _SLEEPS] = 1
        time.sleep(0)  # the writer sees it before this side looks for the last time
        if words[self._segment.slot(self._number + 1) + _NUMBER] != self._number + 1:
            self._writer_lives = self._sleeper.sleep(seconds)
        words[self._line + _SLEEPS] = 0

    def _take_piece(self) -> int | None:
        """Copy the next piece, if it is there, and return its size word."""
        words = self._segment.words
        number = self._number + 1
        slot = self._segment.slot(number)
        if words[slot + _NUMBER] != number:
            return None
        size, begin = words[slot + _SIZE], 8 * (slot + _LINE)
        piece = bytes(self._segment.bytes[begin : begin + min(size // 2, PIECE_BYTES)])
        if words[slot + _CHECKSUM] != _checksum(number, size, piece):
            self._bad_checksums += 1
            if self._bad_checksums > _MOST_BAD_CHECKSUMS:
                raise ChannelError(f"piece {number} of the shared memory is damaged")
            return None
        self._bad_checksums = 0
        self._number = number
        self._pieces.append(piece)
        words[self._line + _DONE] = number
        words[self._line + _DONE_COMPLEMENT] = number ^ _MASK
        return size
