"""Distance between draft and target distributions: soft cross-entropy and total variation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

# Entries of a target distribution below this are not added to the candidates.
_NEGLIGIBLE = 1e-3


class DraftLoss:
    """`sum_rows (1 - w) * -sum_v p(v) log q(v) + w * sum_v |p(v) - q(v)|`.

    A draft that guesses the target's sample with the target's own noise is right about as often as
    the distributions overlap, which the second term measures. It is computed as
    `2 - 2 sum_v min(p(v), q(v))`, so entries that are left out of p do no harm.

    With `num_negatives` the normaliser is estimated by importance sampling: candidates are the
    tokens in any row's target distribution and so many others, drawn uniformly, whose logits are
    increased by the log of the number of tokens that each represents.

    Args:
        l1_weight: w.
    """

    def __init__(self, vocab_size: int, num_negatives: int | None, l1_weight: float) -> None:
        self._vocab_size = vocab_size
        self._num_negatives = num_negatives
        self._l1_weight = l1_weight

    def candidates(
        self, target_ids: torch.Tensor, target_probs: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Candidate token ids [C] and offsets to their logits [C]; None for the whole
        vocabulary.
        """
        if self._num_negatives is None:
            return None
        chosen = torch.zeros(self._vocab_size, dtype=torch.bool, device=target_ids.device)
        chosen[target_ids[target_probs >= _NEGLIGIBLE]] = True
        chosen[target_ids[:, 0]] = True
        others = (~chosen).nonzero()[:, 0]
        count = min(self._num_negatives, len(others))
        positives = chosen.nonzero()[:, 0]
        offsets = torch.zeros(len(positives) + count, device=target_ids.device)
        if count:
            order = torch.randperm(len(others), generator=generator)[:count]
            offsets[len(positives) :] = math.log(len(others) / count)
            others = others[order.to(others.device)]
        return torch.cat((positives, others[:count])), offsets

    def __call__(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        target_ids: torch.Tensor,
        target_probs: torch.Tensor,
        candidates: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [N, size], head [vocab, size], targets [N, K] -> loss, and hits [N] bool.

        A hit is a row whose most likely candidate is the target's most likely token.
        """
        if candidates is None:
            logits, places = F.linear(hidden, head).float(), target_ids
            hits = logits.detach().argmax(-1) == places[:, 0]
        else:
            ids, offsets = candidates
            logits = F.linear(hidden, head[ids]).float()
            place_of = ids.new_full((self._vocab_size,), -1)
            place_of[ids] = torch.arange(len(ids), device=ids.device)
            places = place_of[target_ids]
            # Negligible entries may be missing among the candidates.
            target_probs = target_probs.masked_fill(places < 0, 0.0)
            places = places.clamp(min=0)
            hits = logits.detach().argmax(-1) == places[:, 0]
            logits = logits + offsets
        log_q = logits.log_softmax(-1).gather(1, places)
        entropy = -(target_probs * log_q).sum()
        if not self._l1_weight:
            return entropy, hits
        overlap = torch.minimum(target_probs, log_q.exp()).sum()
        l1 = 2 * (len(hidden) - overlap)
        return (1 - self._l1_weight) * entropy + self._l1_weight * l1, hits
