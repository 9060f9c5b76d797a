"""What a stream says of how its tokens came: sampled, accepted drafts, or corrections."""

from __future__ import annotations

from collections import Counter
from typing import Any

from atom.outputs import CompletionOutput, RequestOutput, StepTokens
from atom.text.detokenizer import Detokenizer, Vocabulary


class OriginCounts:
    """Tokens by how they came; all together they are the tokens of the completion."""

    def __init__(self) -> None:
        self.sampled = self.corrected = 0
        self.accepted: Counter[str] = Counter()

    def add(self, step: StepTokens) -> None:
        num_accepted = min(step.num_accepted, step.num_tokens)
        if num_accepted:
            self.accepted[step.source or "draft"] += num_accepted
        if step.num_tokens > num_accepted:
            if step.num_accepted < step.num_drafts:
                self.corrected += 1
            else:
                self.sampled += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "sampled": self.sampled,
            "corrected": self.corrected,
            "accepted": dict(self.accepted),
        }


class SpeculationFields:
    """The `speculation` of the chunks of one stream, and of its usage.

    Tokens whose text is held back by a parser go with the choice's next chunk.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._detokenizers: dict[int, Detokenizer] = {}
        self._held: dict[int, list[dict[str, Any]]] = {}
        self._counts: dict[int, OriginCounts] = {}
        self._total = OriginCounts()
        self._num_steps = 0
        # By position: drafts verified, and accepted.
        self._verified: list[int] = []
        self._accepted: list[int] = []

    def add(self, base: int, request: RequestOutput) -> None:
        """Take in the new tokens of a prompt, whose first choice is number `base`."""
        for output in request.outputs:
            self._add(base + output.index, request.prompt_token_ids, output)

    def take(self, index: int) -> dict[str, Any]:
        """What has been added of a choice since the last call."""
        spelled = {**self._counts[index].as_dict(), "steps": self._held[index]}
        self._begin(index)
        return spelled

    def totals(self) -> dict[str, Any]:
        """The same over all choices so far, and acceptance by position."""
        return {
            **self._total.as_dict(),
            "num_steps": self._num_steps,
            "verified_per_position": list(self._verified),
            "accepted_per_position": list(self._accepted),
        }

    def _add(self, index: int, prompt_token_ids: list[int], output: CompletionOutput) -> None:
        detokenizer = self._detokenizers.get(index)
        if detokenizer is None:
            detokenizer = self._detokenizers[index] = self._vocabulary.detokenizer(
                skip_special_tokens=False, context_ids=prompt_token_ids
            )
            self._begin(index)
        token_ids = iter(output.token_ids)
        for step in output.steps:
            texts = [detokenizer.feed([next(token_ids)]) for _ in range(step.num_tokens)]
            self._held[index].append(_spelled(step, texts))
            self._counts[index].add(step)
            self._count(step)

    def _begin(self, index: int) -> None:
        self._held[index], self._counts[index] = [], OriginCounts()

    def _count(self, step: StepTokens) -> None:
        self._total.add(step)
        self._num_steps += 1
        missing = step.num_drafts - len(self._verified)
        self._verified += [0] * missing
        self._accepted += [0] * missing
        for position in range(step.num_drafts):
            self._verified[position] += 1
            self._accepted[position] += position < step.num_accepted


def _spelled(step: StepTokens, texts: list[str]) -> dict[str, Any]:
    if not step.num_drafts:
        return {"tokens": texts}
    return {
        "tokens": texts,
        "source": step.source,
        "num_drafts": step.num_drafts,
        "num_accepted": step.num_accepted,
    }
