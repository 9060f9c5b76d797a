"""How many drafts the engine would keep, measured on held-out texts.

The text is the target's sample at its own temperature, so the noise that the target drew it with
is known in distribution: Gumbel noise under the condition that the text's token won the race. The
draft races with the same noise, as in serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from atom_train.data.dataset import Example
from atom_train.data.target_probs import TargetProbabilities
from atom_train.networks.layers import TrainingBatch

_TEXTS_AT_A_TIME = 4
_SEED = 0


def race_noise(
    target_logprobs: torch.Tensor, answers: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Gumbel noise [N, vocab] with which a target of these probabilities chooses `answers`.

    Args:
        target_logprobs: [N, vocab], divided by the temperature; normalised, over a larger
            vocabulary if the draft's is pruned.
        answers: [N] int64.
    """

    def gumbel(*shape: int) -> torch.Tensor:
        noise = torch.empty(shape).exponential_(generator=generator)
        return -noise.to(target_logprobs.device).log()

    best = gumbel(len(answers), 1)
    raced = target_logprobs + gumbel(*target_logprobs.shape)
    # Truncated at the winner's value (Maddison et al., A* sampling, 2014).
    raced = -torch.logaddexp(-best, -raced)
    raced = raced.scatter(1, answers[:, None], best)
    return raced - target_logprobs


@dataclass(frozen=True)
class HeldOut:
    """Texts that only measure.

    Args:
        build: texts -> batch.
        unroll: batch -> for each draft step the rows [Q, size] that `output_head` multiplies.
        target: whose vocabulary is ascending.
    """

    texts: Sequence[Example]
    build: Callable[[Sequence[Example]], TrainingBatch]
    unroll: Callable[[TrainingBatch], list[torch.Tensor]]
    output_head: Callable[[], torch.Tensor]
    target: TargetProbabilities

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """For each temperature of the texts, the share of rows whose first 1, 2, ... drafts are
        right, as `{"0.7": {"accepted": [...], "rows": int}}`.
        """
        measured = {}
        for temperature in sorted({text.temperature for text in self.texts}):
            [right] = self.race(temperature, [1.0])
            shares = (right.sum(1) / max(right.shape[1], 1)).tolist()
            accepted = [round(share, 4) for share in shares]
            measured[str(temperature)] = {"accepted": accepted, "rows": right.shape[1]}
        return measured

    @torch.no_grad()
    def race(self, temperature: float, scales: Sequence[float]) -> torch.Tensor:
        """[scales, depth, rows] bool: whether all drafts so far are the tokens of the texts of this
        temperature, of which there are some, when drafts race at so many times it.

        The noise is the same for all scales.
        """
        generator = torch.Generator().manual_seed(_SEED)
        texts = [text for text in self.texts if text.temperature == temperature]
        batches = (
            self.build(texts[i : i + _TEXTS_AT_A_TIME])
            for i in range(0, len(texts), _TEXTS_AT_A_TIME)
        )
        raced = [self._right(batch, temperature, scales, generator) for batch in batches]
        return torch.cat(raced, dim=2)

    def _right(
        self,
        batch: TrainingBatch,
        temperature: float,
        scales: Sequence[float],
        generator: torch.Generator,
    ) -> torch.Tensor:
        """`race` with one batch.

        Each step reads the text's tokens: the drafts, as long as all are right.
        """
        whole, vocabulary = batch.valid.all(0), self.target.vocabulary
        logprobs = self.target.logprobs(batch.final, temperature) if temperature else None
        right = []
        for j, rows in enumerate(self.unroll(batch)):
            logits = F.linear(rows[whole], self.output_head()).float()
            answers = batch.answer_ids[j, whole]
            if logprobs is None:
                chosen = [logits.argmax(-1)] * len(scales)
            else:
                places = torch.searchsorted(vocabulary, answers).clamp(max=len(vocabulary) - 1)
                noise = race_noise(logprobs[batch.targets[j, whole]], places, generator)
                chosen = [(logits / (temperature * c) + noise).argmax(-1) for c in scales]
            right.append(vocabulary[torch.stack(chosen)] == answers)
        return torch.stack(right, dim=1).cumprod(1).bool()
