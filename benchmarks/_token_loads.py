"""The choice of tokens for kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _bytes import choice_bytes
from _device import num_calls
from _kernel_loads import Calls, Case, FoundOps
from _kernel_sizes import ChoiceSizes

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.platform import Platform


class Choice:
    """Every row's token from its logits, at a temperature; each call has other logits."""

    op = "choose_tokens"
    storage: torch.dtype | None = None

    def __init__(self, sizes: ChoiceSizes, platform: Platform, rotated_bytes: int) -> None:
        self.sizes = str(sizes)
        self._sizes, self._platform, self._rotated_bytes = sizes, platform, rotated_bytes
        self._function: Any = None

    def refusal(self, case: Case) -> str | None:
        """None: logits take little memory."""
        del case
        return None

    def use(self, implementation: str) -> None:
        ops = FoundOps(self._platform, self.op, implementation)
        self._function = ops.resolve(self.op, torch.float32, vocab_size=self._sizes.vocab_size)

    def calls(self, case: Case) -> Calls:
        s, function, device = self._sizes, self._function, self._platform.device
        generator = torch.Generator(device).manual_seed(case.batch)

        def rows(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((case.batch,), value, dtype=dtype, device=device)

        places = torch.arange(case.batch, device=device)
        metadata = SamplingMetadata(
            temperature=rows(1.0, torch.float32),
            top_k=None if s.top_k is None else rows(s.top_k, torch.int32),
            top_p=None if s.top_p is None else rows(s.top_p, torch.float32),
            seeds=places,
            positions=places + 1,
        )
        size = choice_bytes(case.batch, s.vocab_size)
        count = num_calls(size, self._rotated_bytes, self._rotated_bytes)
        shape = case.batch, s.vocab_size

        def call() -> Callable[[], torch.Tensor]:
            # A few tokens have most of the mass, as in a text.
            logits = 3 * torch.randn(shape, generator=generator, device=device)
            return lambda: function(logits, metadata)

        return Calls([call() for _ in range(count)], size)
