"""Numbers of the host to the device, without waiting for the work that is under way there."""

from __future__ import annotations

import torch


def upload(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor in the CPU's memory as one of `device`.

    A copy from pageable memory would wait until a GPU has done all that was launched before. The
    allocator of pinned memory hands it out again only once the copy is made.
    """
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
