"""Where things lie in the shared memory of a broadcast."""

from __future__ import annotations

import mmap
import struct
import zlib

NUM_SLOTS = 16
PIECE_BYTES = 65536 - 64

# Places in 8-byte words. Lines of 64 bytes keep what two processes write apart.
LINE = 8
TOKEN = 0  # 2 words
END = LINE  # 1 + the number of pieces, once the writer has closed
READERS = 2 * LINE
# In a reader's line
DONE, DONE_COMPLEMENT, PID, HAS_LEFT, BELL, SLEEPS = range(6)
# In a slot's first line
NUMBER, SIZE, CHECKSUM = range(3)
_SLOT = LINE + PIECE_BYTES // 8
MASK = (1 << 64) - 1


def segment_bytes(num_readers: int) -> int:
    words = READERS + num_readers * LINE + NUM_SLOTS * _SLOT
    return -(-8 * words // mmap.PAGESIZE) * mmap.PAGESIZE


def checksum(number: int, size: int, piece: bytes | memoryview) -> int:
    return zlib.crc32(piece, zlib.crc32(struct.pack("<QQ", number, size)))


class Segment:
    """Words and bytes of the mapped memory. Sizes count bytes twice, plus 1 if more follow."""

    def __init__(self, memory: mmap.mmap, num_readers: int) -> None:
        self.bytes = memoryview(memory)
        # Native words: one store writes 8 bytes.
        self.words = self.bytes.cast("Q")
        self._first_slot = READERS + num_readers * LINE

    def slot(self, number: int) -> int:
        """The first word of the slot of a piece."""
        return self._first_slot + number % NUM_SLOTS * _SLOT

    def release(self) -> None:
        self.words.release()
        self.bytes.release()
