"""The host-side data of one step: what the scheduler asks of the model runner.

Tensors live in `atom.model_ops.metadata`; everything here is plain Python.
"""

from __future__ import annotations

import msgspec

from atom.messages import TokenLogprobs
from atom.sampling_params import SamplingParams


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step.

    Attributes:
        id: the sequence.
        row: where the runner keeps what it knows of the sequence; its own while it runs.
        token_ids: the tokens to compute, at positions `start`, `start + 1`, ...
        start: number of tokens already in the KV cache.
        new_block_ids: what the sequence's block table grows by before this step.
        num_blocks: length of the table then; it covers `start + len(token_ids)` tokens.
        wants_sample: the last row's logits are sampled (false for a middle prefill chunk).
        num_drafts: how many of the last `token_ids` are drafts to verify.
        draft_source: who was asked for them, also when none came of it; None when nobody was.
        successor_token: on a middle prefill chunk, the prompt token after the chunk (a drafter
            pairs it with the last row); None otherwise.
    """

    id: str
    row: int
    token_ids: list[int]
    start: int
    new_block_ids: list[int]
    num_blocks: int
    wants_sample: bool
    num_drafts: int = 0
    draft_source: str | None = None
    successor_token: int | None = None

    @property
    def draft_token_ids(self) -> list[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def context_len(self) -> int:
        """Tokens in the KV cache once the step has run."""
        return self.start + len(self.token_ids)


class NewSequence(msgspec.Struct, frozen=True):
    """What the runner must know of a sequence before its first step.

    `prompt_token_ids` and `output_token_ids` are the tokens known when it is (re)scheduled.
    """

    id: str
    row: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    params: SamplingParams
    seed: int


class ScheduledBatch(msgspec.Struct, frozen=True):
    """One step.

    Attributes:
        new: sequences whose first step this is.
        freed_rows: rows whose sequences are gone; they are forgotten before `new` is learnt.
    """

    sequences: list[ScheduledSequence]
    new: list[NewSequence]
    freed_rows: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


class SequenceResult(msgspec.Struct, frozen=True, gc=False):
    """What a step computed for one scheduled sequence.

    Attributes:
        token_ids: accepted and sampled tokens, in order; empty when nothing was sampled.
        logprobs: one entry per token of `token_ids`, when asked for.
        prompt_logprobs: one entry per prompt token predicted by this step's rows (row `start + i`
            predicts prompt token `start + i + 1`), when asked for.
        draft_token_ids: guesses for the next step.
        draft_source: who was asked for them; None when nothing was sampled.
        failure: why the sequence cannot go on after `token_ids`, which may be empty; None when
            it can.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    draft_token_ids: list[int] = []
    draft_source: str | None = None
    failure: str | None = None


class StepOutput(msgspec.Struct, frozen=True):
    """Results in the order of `ScheduledBatch.sequences`."""

    sequences: list[SequenceResult]
