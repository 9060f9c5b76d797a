"""Work on tensors that stay where they are, captured at the start under keys."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from atom.graphs.capture import CaptureBackend, copy_all

# Returns its results.
Work = Callable[[], Sequence[torch.Tensor]]


class CapturedWork:
    """Replays work that was captured; its results are kept where no other work writes."""

    def __init__(self, backend: CaptureBackend) -> None:
        self._backend = backend
        self._kept: dict[Hashable, list[torch.Tensor]] = {}
        self._replays: dict[Hashable, Callable[[], None]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._replays

    @torch.inference_mode()
    def capture(self, key: Hashable, work: Work, last: Sequence[torch.Tensor] = ()) -> None:
        """Capture `work`, as `CaptureBackend.capture` wants it.

        Args:
            last: where the last results are kept; the others are in memory of their own.
        """
        results = work()
        kept = [torch.empty_like(result) for result in results[: len(results) - len(last)]]
        self._kept[key] = [*kept, *last]
        self._replays[key] = self._backend.capture(partial(self._compute, key, work))

    def replay(self, key: Hashable) -> list[torch.Tensor]:
        """The results, valid until the next replay of the same key."""
        self._replays[key]()
        return self._kept[key]

    def release(self) -> None:
        """Drop everything."""
        self._replays.clear()

    def _compute(self, key: Hashable, work: Work) -> None:
        """What is captured."""
        copy_all(self._kept[key], work())
