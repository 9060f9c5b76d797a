"""The two copies of a step: everything that the device needs goes there at once, and comes back so.

On a CPU the same copies are made within the host's memory, so that there is one path.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_DTYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
_WORD_BYTES = 8
# Of every place, in words: Triton compiles a kernel anew for pointers that are not so aligned.
_ALIGNMENT = 2


class StagingBuffer:
    """Arrays of one step, written on the host and sent to the device in one copy.

    Places are handed out one after another, so the same sequence of sizes gives the same places
    at every step: a graph can be captured on what `reserve` returns. On a GPU the host's memory is
    pinned, and is not written again before it was read.

    Attributes:
        host: what is sent.

    Args:
        num_bytes: room; what does not fit is uploaded by itself.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        words = -(-num_bytes // _WORD_BYTES)
        self.device = device
        self.host = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._sent = torch.zeros(words, dtype=torch.int64, device=device)
        self._host_views = {t: self.host.numpy().view(n) for t, n in _DTYPES.items()}
        self._sent_views = {t: self._sent.view(t) for t in _DTYPES}
        self._was_read: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._was_read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._used = 0

    def restart(self) -> None:
        """Begin a step: every place may be handed out again."""
        if self._was_read is not None:
            self._was_read.synchronize()
        self._used = 0

    def reserve(
        self, size: int, dtype: torch.dtype = torch.int64
    ) -> tuple[np.ndarray, torch.Tensor]:
        """Room for `size` numbers: where the host writes them, and where the device reads them.

        The device's tensor holds them after the next `send`.

        Raises:
            ValueError: when there is no room.
        """
        start = self._claim(size, dtype)
        if start is None:
            raise ValueError(f"no room for {size} numbers of {dtype} in the staging buffer")
        end = start + size
        return self._host_views[dtype][start:end], self._sent_views[dtype][start:end]

    def put(self, values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Write numbers of any shape; the device's tensor holds them after the next `send`."""
        size = values.size
        start = self._claim(size, dtype)
        if start is None:
            own = torch.from_numpy(np.ascontiguousarray(values, dtype=_DTYPES[dtype]))
            return own.to(self.device)
        self._host_views[dtype][start : start + size] = values.ravel()
        sent = self._sent_views[dtype][start : start + size]
        return sent if values.ndim == 1 else sent.view(values.shape)

    def send(self) -> None:
        """The copy to the device."""
        self._sent[: self._used].copy_(self.host[: self._used], non_blocking=True)
        if self._was_read is not None:
            self._was_read.record()

    def _claim(self, size: int, dtype: torch.dtype) -> int | None:
        """The first place of `size` numbers, counted in numbers; None without room."""
        per_word = _WORD_BYTES // dtype.itemsize
        used = self._used + -(-size // (per_word * _ALIGNMENT)) * _ALIGNMENT
        if used > self.host.shape[0]:
            return None
        start = self._used * per_word
        self._used = used
        return start


def bring_to_host(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Arrays of the same shapes, in one copy that the host waits for.

    Args:
        tensors: of int64 (whose numbers fit in 32 bits), int32 or float32, on one device.

    Returns:
        int32 arrays, float32 where the tensor was.
    """
    if not tensors:
        return []
    flat = [
        t.flatten().view(torch.int32) if t.is_floating_point() else t.flatten() for t in tensors
    ]
    packed = torch.cat([part.to(torch.int32) for part in flat]).cpu().numpy()
    arrays, start = [], 0
    for tensor in tensors:
        end = start + tensor.numel()
        part = packed[start:end].reshape(tensor.shape)
        arrays.append(part.view(np.float32) if tensor.is_floating_point() else part)
        start = end
    return arrays
