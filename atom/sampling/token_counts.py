"""Token counts on the device, for penalties."""

from __future__ import annotations

import torch

from atom.model_ops.upload import upload

# This bit is set for prompt tokens; the bits below count how often a token was generated.
_IN_PROMPT = 1 << 30


class TokenCounts:
    """A row of int32 counters [V] for each sequence with penalties.

    Rows are allocated on demand and reused.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def claim(self, prompt_token_ids: list[int], output_token_ids: list[int]) -> int:
        """Take a slot and count these tokens in it."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        counts = self._counts[slot].zero_()
        device = counts.device
        if output_token_ids:
            outputs = upload(torch.tensor(output_token_ids), device)
            counts.index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
        prompt = upload(torch.tensor(sorted(set(prompt_token_ids)), dtype=torch.int64), device)
        counts.index_add_(0, prompt, torch.full_like(prompt, _IN_PROMPT, dtype=torch.int32))
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor, num_kept: torch.Tensor) -> None:
        """Count generated tokens.

        Args:
            slots: [n] int64.
            token_ids: [n, k] int64; only the first `num_kept[i]` of row i count.
            num_kept: [n] int64.
        """
        places = torch.arange(token_ids.shape[1], device=token_ids.device)
        kept = places < num_kept[:, None]
        flat = slots[:, None] * self._vocab_size + token_ids.clamp(min=0)
        self._counts.view(-1).index_add_(0, flat.flatten(), kept.flatten().to(torch.int32))

    def seen(
        self, slots: torch.Tensor, more: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens seen so far.

        Args:
            slots: [n] int64.
            more: indices [m] into n, and tokens [m], int64, to count as generated as well.

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
        """Add half as many slots, at least one."""
        known = self._counts.shape[0]
        more = max(known // 2, 1)
        self._counts = torch.cat((self._counts, self._counts.new_zeros(more, self._vocab_size)))
        self._free += range(known, known + more)
