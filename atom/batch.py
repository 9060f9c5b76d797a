"""The host-side data of one step, between scheduler and model runner.

Plain Python; tensors are in `atom.model_ops.attention.metadata`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from atom.messages import ImageInput, TokenLogprobs
from atom.sampling_params import Needs, SamplingParams
from atom.stats import ExpectedAcceptance


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step.

    Attributes:
        id: sequence id.
        row: the sequence's row in the runner's tables, its own while it runs.
        token_ids: the tokens to compute, at positions `start`, `start + 1`, ...
        start: number of tokens already in the KV cache.
        new_block_ids: blocks appended to the block table before this step.
        num_blocks: length of the block table then; it covers `start + len(token_ids)` tokens.
        wants_sample: whether to sample from the last row; false for a prefill chunk that is not the
            last.
        num_drafts: how many of the last `token_ids` are drafts to verify.
        draft_source: what was asked for drafts (such as `eagle3` or `lookup`), also if it made
            none; None when nothing was.
        successor_token: after a prefill chunk that is not the last, the next prompt token
            (proposers pair it with the last row); else None.
        wants_drafts: whether its request lets drafts be made for the next step.
        is_ahead: the step is launched before the results of the one that samples its first token
            are read. That token, the drafts and their place are on the device: `token_ids` are
            zeros, and `start` is the most that it may be.
        knows_drafts: it is ahead, but its drafts are in `token_ids`, not on the device.
        new_windows: block -> the one that layers with a window have for it from this step on; None
            if nothing changes, or they have no blocks of their own.
        load_state: the slot of the recurrent state that it starts from, which is that behind
            `start` tokens; None for its own.
        keep_state: the slot to keep its state in that is behind this step's tokens, all of which
            are known; None for none.
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
    wants_drafts: bool = True
    is_ahead: bool = False
    knows_drafts: bool = False
    new_windows: dict[int, int] | None = None
    load_state: int | None = None
    keep_state: int | None = None

    @property
    def draft_token_ids(self) -> list[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def context_len(self) -> int:
        """Tokens in the KV cache once the step has run."""
        return self.start + len(self.token_ids)


class NewSequence(msgspec.Struct, frozen=True):
    """What the runner needs to know about a sequence before its first step.

    `prompt_token_ids` and `output_token_ids` are those known when it starts or resumes. Of other
    sequences' outputs it may see those with the same `cache_salt` through a lookup. `images` are
    those of the prompt.
    """

    id: str
    row: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    params: SamplingParams
    seed: int
    cache_salt: str = ""
    images: tuple[ImageInput, ...] = ()


class ScheduledBatch(msgspec.Struct, frozen=True):
    """One step.

    Attributes:
        new: sequences that start or resume in this step.
        freed_rows: rows to clear before `new` is added.
        num_decoding: of the sequences, those that compute nothing but their newest output token and
            drafts: no prompt, and no outputs again.
    """

    sequences: list[ScheduledSequence]
    new: list[NewSequence]
    freed_rows: list[int]
    num_decoding: int = 0

    @property
    def num_tokens(self) -> int:
        return sum([len(s.token_ids) for s in self.sequences])

    @property
    def num_drafting(self) -> int:
        """Sequences that the step samples and that want drafts."""
        return sum([s.wants_sample and s.wants_drafts for s in self.sequences])


class RankStep(msgspec.Struct, frozen=True):
    """What the first rank tells the others to do in a step.

    Attributes:
        batch: without what only the first rank needs: it alone samples, but every rank drafts.
        num_drafts: drafts to make for each sampled sequence.
        kind: how the tokens of all sampled rows are chosen, as `SamplePlan.kind`.
        is_idle: the batch is empty, and other engines that share the experts compute: a padding row
            goes along.
    """

    batch: ScheduledBatch
    num_drafts: int
    kind: Needs | None = None
    is_idle: bool = False

    @property
    def is_nothing(self) -> bool:
        return not (self.is_idle or self.batch.sequences or self.batch.freed_rows)

    @classmethod
    def of(cls, batch: ScheduledBatch, num_drafts: int, kind: Needs | None = None) -> RankStep:
        new = [_without_sampling(sequence) for sequence in batch.new]
        return cls(ScheduledBatch(batch.sequences, new, batch.freed_rows), num_drafts, kind)


def _without_sampling(new: NewSequence) -> NewSequence:
    """What tells which rows have logits, and which race drafts run in: all ranks compute them."""
    p = new.params
    params = SamplingParams(
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        prompt_logprobs=p.prompt_logprobs,
    )
    known: tuple[list[int], list[int]] = ([], [])
    if p.prompt_logprobs is not None:
        known = new.prompt_token_ids, new.output_token_ids
    return NewSequence(new.id, new.row, *known, params, new.seed, images=new.images)


class SequenceResult(msgspec.Struct, frozen=True, gc=False):
    """What a step computed for one sequence.

    Attributes:
        token_ids: accepted drafts and the sampled token, in order; empty when nothing was sampled.
        logprobs: one entry per token of `token_ids`, if requested.
        prompt_logprobs: one entry per prompt token predicted by this step's rows (row `start + i`
            predicts prompt token `start + i + 1`), if requested.
        draft_token_ids: drafts for the next step.
        draft_source: what was asked for them, such as `eagle3` or `lookup`; None when nothing was
            sampled.
        failure: why the sequence cannot continue after `token_ids`, which may be empty; None if it
            can.
        drafts_after_next: with a step launched already that goes on from these tokens: drafts for
            the one behind it, with their source, if that one brings what is expected. None where
            those that lie on the device by then are expected to bring more.
        tokens_lost_by_overlap: how many tokens fewer a step is expected to bring that is launched
            before the results of the one before it are read, since its drafts are looked up late.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    draft_token_ids: list[int] = []
    draft_source: str | None = None
    failure: str | None = None
    drafts_after_next: tuple[list[int], str] | None = None
    tokens_lost_by_overlap: float = 0.0


class StepParts(msgspec.Struct, frozen=True):
    """Which parts of a step were replayed: graphs, or programs on a CPU.

    Attributes:
        target: the model's layers were.
        sample: the choice of tokens was.
        drafts: what the proposer does was; None when it had nothing to do.
    """

    target: bool = False
    sample: bool = False
    drafts: bool | None = None


class EncoderCounts(msgspec.Struct, frozen=True):
    """What was asked of the image encoder since the last step that says so.

    Attributes:
        queries, hits, seconds: as `mm_cache_queries`, `mm_cache_hits` and `encoder_seconds` of
            `EngineStats`.
    """

    queries: int = 0
    hits: int = 0
    seconds: float = 0.0


class StepOutput(msgspec.Struct, frozen=True):
    """Attributes:
    sequences: results in the order of `ScheduledBatch.sequences`.
    num_lookup_tokens: tokens that the lookup holds after the step.
    encoder: None without an image encoder.
    """

    sequences: list[SequenceResult]
    num_lookup_tokens: int = 0
    parts: StepParts = StepParts()
    encoder: EncoderCounts | None = None


class LaunchedStep(msgspec.Struct, frozen=True):
    """A step whose results are not read yet.

    Attributes:
        collect: waits for the results; steps are collected in the order in which they are launched.
        num_drafts: how many drafts that lie on the device the next step verifies, of each sampled
            sequence that wants them.
        draft_source: the source of these drafts, as in `SequenceResult`.
    """

    collect: Callable[[], StepOutput]
    num_drafts: int = 0
    draft_source: str | None = None


@dataclass(frozen=True)
class Lookahead:
    """What the scheduler needs to know about a proposer.

    Attributes:
        num_tokens: maximum drafts per step.
        kv_depends_on_successor: whether the proposer's KV at a position depends on the next token;
            prefix cache hashes then include the token after each block.
        expected_acceptance: what the draft's card says that it reaches, if it does.
        num_slots: KV slots that the proposer writes behind the newest token, if they are more than
            the drafts.
    """

    num_tokens: int = 0
    kv_depends_on_successor: bool = False
    expected_acceptance: ExpectedAcceptance | None = None
    num_slots: int = 0

    @property
    def num_reserved(self) -> int:
        """Extra KV slots to reserve."""
        return max(self.num_tokens, self.num_slots)


NO_LOOKAHEAD = Lookahead()
