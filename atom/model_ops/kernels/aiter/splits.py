"""How aiter's latent decode splits contexts, and the device tables that tell it."""

from __future__ import annotations

import torch

# Most splits of a context, and the fewest tokens of each that are worth one. aiter's kernel that
# joins them takes a sequence's queries and their splits one after another.
_MAX_SPLITS = 16
_SPLIT_TOKENS = 256
# Sequences of the first table of each number of splits.
_SEQUENCES = 1024


def num_splits(programs: int, max_context_len: int, compute_units: int) -> int:
    """The fewest splits that keep most of the device busy in every round of programs.

    Args:
        programs: their number without splits.
    """
    most = min(_MAX_SPLITS, max(1, max_context_len // _SPLIT_TOKENS))

    def busy(splits: int) -> float:
        split = programs * splits
        return split / (-(-split // compute_units) * compute_units)

    return max(range(1, most + 1), key=busy)


def leave_units_idle(programs: int, max_context_len: int, compute_units: int) -> bool:
    """Whether more splits than there may be would be worth it, and keep more units busy."""
    worth = max_context_len // _SPLIT_TOKENS
    return worth > _MAX_SPLITS and programs * _MAX_SPLITS < compute_units


class SplitTables:
    """Tables 0, n, 2n, ... int32 for n splits of each sequence.

    They are never freed, since captured graphs read them where they were at capture. A table is
    made at its first use: in a graph's warm-up run, not at its capture.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.device], list[torch.Tensor]] = {}

    def table(self, sequences: int, splits: int, device: torch.device) -> torch.Tensor:
        """[sequences + 1]."""
        kept = self._kept.setdefault((splits, device), [])
        if not kept or len(kept[-1]) <= sequences:
            size = _SEQUENCES
            while size < sequences:
                size *= 2
            numbers = torch.arange(size + 1, dtype=torch.int32, device=device)
            kept.append(numbers * splits)
        return kept[-1][: sequences + 1]


SPLITS = SplitTables()
