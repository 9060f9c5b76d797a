"""What the tests of native kernels share."""

from __future__ import annotations

import torch
from one_thread import one_thread  # noqa: F401  # a fixture


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)
