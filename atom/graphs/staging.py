"""The two copies of a step: all inputs to the device, all results to the host.

On a CPU the same copies are made in host memory, so that there is one code path; where steps are
recorded, they read what was written in its place, and results are read where they lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch

from atom.model_ops.upload import upload

_DTYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
_WORD_BYTES = 8
# In words, for every reservation: Triton recompiles a kernel for pointers with another alignment.
_ALIGNMENT = 2


class StagingBuffer:
    """The arrays of one step, written on the host and sent to the device in one copy.

    Space is handed out in order, so the same sizes get the same addresses in every step, and a
    graph can be captured on the tensors that `reserve` returns. On a GPU the host memory is pinned,
    and not overwritten before the last copy has finished.

    Attributes:
        host: the host memory.
        is_full: whether some of the step's numbers found no room.

    Args:
        num_bytes: capacity. What `put` cannot fit is uploaded separately.
        in_place: on a CPU, steps read the host memory itself.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, in_place: bool = False) -> None:
        words = -(-num_bytes // _WORD_BYTES)
        self.device = device
        self.host = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._sent = self.host
        if not in_place:
            self._sent = torch.zeros(words, dtype=torch.int64, device=device)
        self._host_views = {t: self.host.numpy().view(n) for t, n in _DTYPES.items()}
        self._sent_views = {t: self._sent.view(t) for t in _DTYPES}
        self._was_read: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._was_read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._used = 0
        self.is_full = False

    def restart(self) -> None:
        """Begin a step: release all reservations."""
        if self._was_read is not None:
            self._was_read.synchronize()
        self._used = 0
        self.is_full = False

    def reserve(
        self, size: int, dtype: torch.dtype = torch.int64
    ) -> tuple[np.ndarray, torch.Tensor]:
        """Reserve `size` numbers; returns the host array to write and the device tensor to read.

        The device tensor is valid after the next `send`.

        Raises:
            ValueError: when the buffer is full.
        """
        start = self._claim(size, dtype)
        if start is None:
            raise ValueError(f"no room for {size} numbers of {dtype} in the staging buffer")
        end = start + size
        return self._host_views[dtype][start:end], self._sent_views[dtype][start:end]

    def put(self, values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Write numbers of any shape; returns the device tensor, valid after the next `send`."""
        size = values.size
        start = self._claim(size, dtype)
        if start is None:
            self.is_full = True
            whole = torch.from_numpy(np.ascontiguousarray(values, dtype=_DTYPES[dtype]))
            return upload(whole, self.device)
        self._host_views[dtype][start : start + size] = values.ravel()
        sent = self._sent_views[dtype][start : start + size]
        return sent if values.ndim == 1 else sent.view(values.shape)

    def send(self) -> None:
        """Start the copy to the device."""
        if self._sent is self.host:
            return
        self._sent[: self._used].copy_(self.host[: self._used], non_blocking=True)
        if self._was_read is not None:
            self._was_read.record()

    def words(self) -> np.ndarray:
        """What is reserved of the host memory, [n] int64."""
        return self._host_views[torch.int64][: self._used]

    def repeat(self, words: np.ndarray) -> None:
        """Begin a step with the reservations and the contents of an earlier one.

        Args:
            words: what `words` was then.
        """
        self.restart()
        self._used = len(words)
        self._host_views[torch.int64][: self._used] = words

    def host_array(self, sent: torch.Tensor) -> np.ndarray:
        """The host array, of one dimension, behind a device tensor of the step."""
        start = (sent.data_ptr() - self._sent.data_ptr()) // sent.element_size()
        return self._host_views[sent.dtype][start : start + sent.numel()]

    def _claim(self, size: int, dtype: torch.dtype) -> int | None:
        """Reserve `size` numbers; returns the first index, in units of `dtype`; None if full."""
        per_word = _WORD_BYTES // dtype.itemsize
        used = self._used + -(-size // (per_word * _ALIGNMENT)) * _ALIGNMENT
        if used > self.host.shape[0]:
            return None
        start = self._used * per_word
        self._used = used
        return start


# Waits for tensors on their way to the host.
Arriving = Callable[[], list[np.ndarray]]


def send_to_host(tensors: Sequence[torch.Tensor]) -> Arriving:
    """Start to copy tensors to the host, in one copy.

    Args:
        tensors: int64, int32 or float32, on one device.

    Returns:
        Waits for the copy and returns arrays of the same shapes and types. Work that is launched
        later may overwrite the tensors.
    """
    if not tensors:
        return list
    packed = torch.cat([tensor.flatten().view(torch.int32) for tensor in tensors])
    copied: torch.cuda.Event | None = None
    if packed.is_cuda:
        # The allocator of pinned memory hands this out again only once the copy is made.
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
    else:
        host = packed.cpu()
    kinds = [(tensor.shape, _DTYPES[tensor.dtype]) for tensor in tensors]

    def arrive() -> list[np.ndarray]:
        if copied is not None:
            copied.synchronize()
        host_bytes, arrays, start = host.numpy().view(np.uint8), [], 0
        for shape, dtype in kinds:
            end = start + shape.numel() * np.dtype(dtype).itemsize
            arrays.append(host_bytes[start:end].view(dtype).reshape(shape))
            start = end
        return arrays

    return arrive


class ReadInPlace(ABC):
    """Results that are read where they lie, on a CPU, before they are written again."""

    @property
    @abstractmethod
    def tensors(self) -> list[torch.Tensor]: ...

    @cached_property
    def arrays(self) -> list[np.ndarray]:
        """The memory of the tensors."""
        return [tensor.numpy() for tensor in self.tensors]
