"""Which tokens a sequence with penalties has seen, counted on the device."""

from __future__ import annotations

import torch

# Set where the prompt holds a token; the bits below count how often it was generated.
_IN_PROMPT = 1 << 30


class TokenCounts:
    """A row of counters for each sequence with penalties: 4 bytes for each token of the vocabulary.

    Rows are allocated as they are needed and used again.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def claim(self, prompt_token_ids: list[int], output_token_ids: list[int]) -> int:
        """A slot that has counted these tokens."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        counts = self._counts[slot].zero_()
        device = counts.device
        if output_token_ids:
            outputs = torch.tensor(output_token_ids, device=device)
            counts.index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
        prompt = torch.tensor(sorted(set(prompt_token_ids)), dtype=torch.int64, device=device)
        counts.index_add_(0, prompt, torch.full_like(prompt, _IN_PROMPT, dtype=torch.int32))
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor, num_kept: torch.Tensor) -> None:
        """Count generated tokens.

        Args:
            slots: [n] int64.
            token_ids: [n, k] int64; of row i the first `num_kept[i]` count, the rest is anything.
        """
        places = torch.arange(token_ids.shape[1], device=token_ids.device)
        kept = places < num_kept[:, None]
        flat = slots[:, None] * self._vocab_size + token_ids.clamp(min=0)
        self._counts.view(-1).index_add_(0, flat.flatten(), kept.flatten().to(torch.int32))

    def seen(
        self, slots: torch.Tensor, more: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What has been seen at some rows.

        Args:
            slots: [n] int64.
            more: rows [m] int64 out of n, and the tokens [m] int64 generated there besides.

        Returns:
            [n, V] bool, in the prompt or generated; [n, V] int32, how often generated.
        """
        counts = self._counts[slots]
        if more is not None:
            rows, tokens = more
            ones = torch.ones_like(tokens, dtype=torch.int32)
            counts.view(-1).index_add_(0, rows * self._vocab_size + tokens, ones)
        return counts != 0, counts & (_IN_PROMPT - 1)

    def _grow(self) -> None:
        """Half as many slots again, one at least."""
        known = self._counts.shape[0]
        more = max(known // 2, 1)
        self._counts = torch.cat((self._counts, self._counts.new_zeros(more, self._vocab_size)))
        self._free += range(known, known + more)
