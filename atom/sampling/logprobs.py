"""Log-probabilities of the model's unmodified distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atom.messages import TokenLogprobs
from atom.model_ops.kernels.torch.sampling import most_likely

_LOGPROB_ROWS = 64
# Extra candidates, so that ties with the last wanted token rarely exceed them.
_TIE_ROOM = 64


@dataclass(frozen=True)
class Logprobs:
    """Logprobs of R rows: of the chosen token and of the n most likely ones.

    Attributes:
        token_ids: [R, 1 + n] int64, the chosen token first.
        values: [R, 1 + n] float32.
        ranks: [R] int64, of the chosen token: 1 + the number of more likely tokens.
    """

    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.token_ids, self.values, self.ranks

    @classmethod
    def joined(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """The rows of all parts, which have the same n."""
        columns = zip(*(part.tensors for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> Logprobs:
    """Logprobs of given tokens and of the most likely ones.

    Args:
        logits: [R, V], any floating point type.
        token_ids: [R] int64.
        num_logprobs: n, the number of most likely tokens.
    """
    n = min(num_logprobs, logits.shape[-1])
    parts = [
        _logprobs_of_rows(rows.to(torch.float32).log_softmax(-1), chosen[:, None], n)
        for rows, chosen in zip(
            torch.split(logits, _LOGPROB_ROWS), torch.split(token_ids, _LOGPROB_ROWS), strict=True
        )
    ]
    return Logprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _logprobs_of_rows(
    logprobs: torch.Tensor, chosen: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = chosen
    if n:
        _, top = most_likely(logprobs, n + _TIE_ROOM)
        ids = torch.cat((chosen, top[:, :n]), dim=-1)
    of_chosen = logprobs.gather(-1, chosen)
    return ids, logprobs.gather(-1, ids), 1 + (logprobs > of_chosen).sum(-1)


def as_messages(columns: Sequence[np.ndarray], wanted: Sequence[int]) -> list[TokenLogprobs]:
    """Convert the host arrays of `Logprobs.tensors`, cut to the number each row needs."""
    rows = zip(*(column.tolist() for column in columns), wanted, strict=True)
    return [_cut(count, ids, values, rank) for ids, values, rank, count in rows]


def _cut(wanted: int, ids: list[int], values: list[float], rank: int) -> TokenLogprobs:
    """The chosen token and the `wanted` most likely ones."""
    count = min(wanted + 1, len(ids))
    return TokenLogprobs(ids[:count], values[:count], [rank, *range(1, count)])
