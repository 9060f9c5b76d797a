"""The target's probabilities of the tokens that a draft knows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# exp of it leaves room for a whole vocabulary of such terms in float32.
_HIGHEST = 70.0


class TargetProbabilities:
    """From final hidden states to the draft's part of the target's distribution.

    Args:
        head: [target vocab, hidden], the target's output rows, in its dtype.
        vocabulary: [draft vocab] int64 target token ids.
    """

    def __init__(self, head: torch.Tensor, vocabulary: torch.Tensor) -> None:
        known = torch.zeros(len(head), dtype=torch.bool, device=head.device)
        known[vocabulary] = True
        self._known = head[vocabulary].float()
        # Only their sum matters, so their rounding does not.
        self._unknown = head[~known]
        self.vocabulary = vocabulary
        self.hidden_size = head.shape[1]

    def logprobs(self, final: torch.Tensor, temperature: float) -> torch.Tensor:
        """[N, hidden] -> [N, draft vocab] float32; `exp` sums to 1 less the unknown tokens."""
        logits = F.linear(final.float() / temperature, self._known)
        best = logits.amax(-1, keepdim=True)
        total = (logits - best).exp_().sum(-1, keepdim=True)
        if len(self._unknown):
            others = F.linear(final.to(self._unknown.dtype), self._unknown).float()
            # Clamped, as the most likely of them may lie above the best known one.
            raised = others.div_(temperature).sub_(best).clamp_(max=_HIGHEST)
            total += raised.exp_().sum(-1, keepdim=True)
        return logits.sub_(best + total.log())
