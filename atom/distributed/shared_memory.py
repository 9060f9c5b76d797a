"""Memory that the processes of one machine share, without a file that could be left behind."""

from __future__ import annotations

import mmap
import os
import sys

from atom.distributed.channel import ChannelError

HAS_SHARED_MEMORY = sys.platform == "linux"


class SharedMemory:
    """Zeroed memory that processes of the same user and machine open by its `path`.

    The path leads through the creator's open files and is valid until it calls `close` or ends.
    The memory goes with the last process that has mapped it, however that may end, and does not
    count towards the size of /dev/shm.

    Raises:
        ChannelError: when there is no memory left, or the platform has none of this kind.
    """

    def __init__(self, num_bytes: int) -> None:
        if sys.platform != "linux":
            raise ChannelError(f"shared memory needs Linux, and this is {sys.platform}")
        try:
            self._descriptor = os.memfd_create("atom-broadcast", os.MFD_CLOEXEC)
        except OSError as error:
            raise _no_memory(num_bytes, error) from error
        try:
            # Takes the pages now: a lack of memory is an error here, and would kill later.
            os.posix_fallocate(self._descriptor, 0, num_bytes)
            self.map = mmap.mmap(self._descriptor, num_bytes)
        except OSError as error:
            os.close(self._descriptor)
            raise _no_memory(num_bytes, error) from error

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Nobody can open it from now on; views of `map` must be released before."""
        self.map.close()
        os.close(self._descriptor)


def open_shared_memory(path: str, num_bytes: int) -> mmap.mmap:
    """Map the `SharedMemory` of another process.

    Raises:
        ChannelError: when it cannot be opened or mapped, or is something else.
    """
    hint = "rank 0 must be alive, of the same user, and in the same PID namespace"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != num_bytes:
                raise ChannelError(f"{path} is not the shared memory of rank 0; {hint}")
            return mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ChannelError(f"cannot map the shared memory of rank 0: {error}; {hint}") from error


def _no_memory(num_bytes: int, error: OSError) -> ChannelError:
    return ChannelError(f"cannot share {num_bytes} bytes of memory: {error}")
