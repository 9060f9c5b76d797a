"""A sequence's state in the engine; only the scheduler changes it."""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from atom.batch import LaunchedStep, ScheduledSequence, SequenceResult
from atom.messages import EngineRequest, FinishReason, SequenceOutput, TokenLogprobs
from atom.model_engine.block_pool import BlockHash, hash_block, root_hash
from atom.sampling_params import COUNTS_OUTPUTS, READS_OUTPUTS, Needs

# One verification: number of drafts, number of accepted ones, and their source.
DraftCounts = tuple[int, int, "str | None"]
_NO_DRAFTS: DraftCounts = (0, 0, None)


class SequenceStatus(enum.Enum):
    """Only a RUNNING sequence holds blocks and has a row in the runner, or one that is FINISHED
    while a launched step still computes it.
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class LaunchedParts:
    """A sequence's parts of steps whose results are not known yet, oldest first.

    Attributes:
        num_tokens: that they compute, drafts included.
        num_sampled: tokens that they bring if all their drafts are accepted.
        is_sampling: whether the newest samples a token.
    """

    num_tokens: int = 0
    num_sampled: int = 0
    is_sampling: bool = False
    # Tokens of each, and those that it brings at most.
    _parts: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, part: ScheduledSequence) -> None:
        tokens = len(part.token_ids)
        sampled = part.num_drafts + 1 if part.wants_sample else 0
        self._parts.append((tokens, sampled))
        self.num_tokens += tokens
        self.num_sampled += sampled
        self.is_sampling = part.wants_sample

    def end_oldest(self) -> None:
        """Its results are known."""
        tokens, sampled = self._parts.pop(0)
        self.num_tokens -= tokens
        self.num_sampled -= sampled
        self.is_sampling = self.is_sampling and bool(self._parts)

    def clear(self) -> None:
        self._parts.clear()
        self.num_tokens = self.num_sampled = 0
        self.is_sampling = False


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its progress.

    Attributes:
        order: (priority, turn, arrival number); the lowest runs first and is preempted last.
        max_num_tokens: prompt and output tokens at which it ends with reason `length`.
        eos_token_ids: the model's end tokens.
        end_ids: all tokens that may end this sequence.
        token_ids: the known tokens: prompt, then outputs.
        draft_token_ids: drafts to verify in the next step.
        draft_source: the source of these drafts, as in `SequenceResult`.
        drafts_after_next: while it is launched, drafts behind what that will bring, as there.
        tokens_lost_by_overlap: as there.
        num_computed: tokens whose KV is in the cache; always less than the known tokens.
        launched: its parts of steps whose results are not known yet.
        row: its row in the runner's per-sequence tables; only while it holds blocks.
        block_ids: the block table.
        num_sent_blocks: how many of them were sent to the runner.
        num_published: leading blocks of the table that are published or came from the prefix cache.
        windowed: the range of its blocks whose parts for layers with a window it holds.
        new_windows: parts that the runner was not told of, as in `ScheduledSequence`.
        shared_tokens: leading tokens whose blocks were in the prefix cache when it was looked up
            last, where a model has recurrent states: some may have none.
        load_state: the slot of the state that it starts from, until the runner is told.
        states_to_keep: slots reserved for the states behind so many tokens.
        kept_states: those of them that a launched step writes, until it is known to be computed.
        prompt_logprobs: those collected so far, None for the first token; None when not requested
            or already delivered.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
        first_scheduled_time: seconds, `time.monotonic()`.
    """

    request: EngineRequest
    order: tuple[int, int, int]
    max_num_tokens: int
    eos_token_ids: frozenset[int]
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    end_ids: frozenset[int] = field(init=False)
    prompt_logprobs: list[TokenLogprobs | None] | None = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    draft_token_ids: list[int] = field(default_factory=list)
    draft_source: str | None = None
    drafts_after_next: tuple[list[int], str] | None = None
    tokens_lost_by_overlap: float = 0.0
    num_computed: int = 0
    launched: LaunchedParts = field(default_factory=LaunchedParts)
    row: int = -1
    block_ids: list[int] = field(default_factory=list)
    num_sent_blocks: int = 0
    num_published: int = 0
    windowed: range = range(0)
    new_windows: dict[int, int] | None = None
    shared_tokens: int = 0
    load_state: int | None = None
    states_to_keep: dict[int, int] = field(default_factory=dict)
    kept_states: dict[int, int] = field(default_factory=dict)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    _hashes: list[BlockHash] = field(default_factory=list)
    _needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        params = self.request.params
        ends = frozenset() if params.ignore_eos else self.eos_token_ids
        self.end_ids = ends.union(params.stop_token_ids or ())
        self.prompt_logprobs = None if self.request.params.prompt_logprobs is None else [None]
        self._needs = params.needs

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def most_computed(self) -> int:
        """`num_computed` after the launched steps if all their drafts are accepted."""
        return self.num_computed + self.launched.num_tokens

    @property
    def most_known(self) -> int:
        """Known tokens after the launched steps if all their drafts are accepted."""
        return len(self.token_ids) + self.launched.num_sampled

    def next_tokens(self, most: int, before: LaunchedStep | None) -> tuple[int, int]:
        """How many known tokens its next step computes, and how many drafts behind them.

        Args:
            most: of both together.
            before: the newest launched step.
        """
        known = self.most_known
        if self.states_to_keep:
            most = self.cut_for_states(most)
        count = known - self.most_computed
        if count > most:
            return most, 0
        params, drafts = self.request.params, len(self.draft_token_ids)
        if self.launched.is_sampling and before is not None:
            drafts = before.num_drafts if params.speculation else 0
            if self.drafts_after_next is not None:
                drafts = len(self.drafts_after_next[0])
        if params.num_speculative_tokens is not None:
            drafts = min(drafts, params.num_speculative_tokens)
        # If all drafts are accepted, the bonus token must still fit in max_num_tokens.
        room = self.max_num_tokens - known - 1
        return count, max(min(drafts, most - count, room), 0)

    def cut_for_states(self, count: int) -> int:
        """How many of its next `count` tokens a step computes, so that it ends where its recurrent
        state is kept.
        """
        start = self.most_computed
        ends = [end for end in self.states_to_keep if start < end < start + count]
        return min(ends) - start if ends else count

    def keep_state_behind(self, end: int) -> int | None:
        """The slot for the state behind `end` tokens, which a step will write; None for none."""
        slot = self.states_to_keep.pop(end, None)
        if slot is not None:
            self.kept_states[end] = slot
        return slot

    def must_wait(self, drafts: bool) -> bool:
        """Whether the host must know its last token before the step that samples the next.

        Args:
            drafts: whether steps verify drafts.
        """
        reads = READS_OUTPUTS | COUNTS_OUTPUTS if drafts else READS_OUTPUTS
        return bool(self._needs & reads) or self.num_outputs < self.request.params.min_tokens

    def block_hashes(self, count: int, block_size: int, overlap: int) -> list[BlockHash]:
        """The hashes of the first `count` blocks; each is computed once.

        Args:
            overlap: number of tokens after a block that its hash includes; they must be known.
        """
        hashes = self._hashes
        while len(hashes) < count:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else root_hash(self.request.cache_salt)
            tokens = self.token_ids[start : start + block_size + overlap]
            hashes.append(hash_block(parent, tokens, start, self.request.images))
        return hashes[:count]

    def take_step(self, scheduled: ScheduledSequence, result: SequenceResult) -> None:
        """Take what a step computed besides new tokens: the KV of known tokens, prompt logprobs and
        the next drafts.

        Raises:
            RuntimeError: when it brings tokens although it samples none, or none although it does.
        """
        if bool(result.token_ids or result.failure) != scheduled.wants_sample:
            raise RuntimeError(
                f"sequence {scheduled.id!r} got {len(result.token_ids)} new tokens from a step "
                f"with wants_sample={scheduled.wants_sample}"
            )
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += result.prompt_logprobs or ()
        self.num_computed += len(scheduled.token_ids) - scheduled.num_drafts
        self.draft_token_ids = result.draft_token_ids if scheduled.wants_drafts else []
        self.draft_source = result.draft_source
        self.drafts_after_next = result.drafts_after_next if scheduled.wants_drafts else None
        self.tokens_lost_by_overlap = (
            result.tokens_lost_by_overlap if scheduled.wants_drafts else 0.0
        )

    def extend(self, token_ids: list[int]) -> tuple[int, FinishReason | None, int | None]:
        """Append output tokens, up to the one that ends the sequence.

        Returns:
            How many were appended, the finish reason (None to go on) and the stop token id to
            report. A stop token that also reaches the maximum length counts as a stop.
        """
        if len(self.token_ids) >= self.max_num_tokens:  # the prompt alone is wanted
            return 0, FinishReason.LENGTH, None
        num_tokens = len(self.token_ids) + len(token_ids)
        if num_tokens < self.max_num_tokens and self.end_ids.isdisjoint(token_ids):
            self.token_ids += token_ids
            return len(token_ids), None, None
        for count, token_id in enumerate(token_ids, 1):
            finish_reason, stop_reason = self._append(token_id)
            if finish_reason is not None:
                return count, finish_reason, stop_reason
        return len(token_ids), None, None

    def _append(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        params = self.request.params
        # The sampler masks end tokens until there are min_tokens outputs, except where a grammar
        # allows nothing else.
        may_stop = self.num_outputs >= params.min_tokens or params.structured_output is not None
        self.token_ids.append(token_id)
        if may_stop and token_id in self.end_ids:
            is_eos = token_id in self.eos_token_ids and not params.ignore_eos
            return FinishReason.STOP, None if is_eos else token_id
        if len(self.token_ids) >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """The prompt's logprobs at the first call; None later, or when not requested.

        Raises:
            RuntimeError: when their number is wrong.
        """
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        if taken is not None and len(taken) != self.num_prompt_tokens:
            raise RuntimeError(
                f"sequence {self.request.id!r} with {self.num_prompt_tokens} prompt tokens got "
                f"{len(taken) - 1} prompt logprobs, expected one for each token but the first"
            )
        return taken

    def report(
        self,
        token_ids: list[int],
        finish_reason: FinishReason | None,
        stop_reason: int | None = None,
        verified: DraftCounts | None = None,
    ) -> SequenceOutput:
        """The output to send to the frontend for new tokens, or for the end."""
        num_drafts, num_accepted, draft_source = verified or _NO_DRAFTS
        return SequenceOutput(
            id=self.request.id,
            token_ids=token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_draft_tokens=num_drafts,
            num_accepted_tokens=num_accepted,
            draft_source=draft_source,
            first_scheduled_time=self.first_scheduled_time,
        )

    def restart(self) -> None:
        """Reset after preemption: all known tokens must be computed again."""
        self.status = SequenceStatus.WAITING
        self.block_ids = []
        self.num_sent_blocks = 0
        self.draft_token_ids = []
        self.draft_source = None
        self.drafts_after_next = None
        self.num_computed = 0
        self.num_published = 0
        self.windowed = range(0)
        self.new_windows = None
        self.num_preemptions += 1
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]


_by_order = attrgetter("order")


class SequenceQueue:
    """Sequences sorted by (priority, arrival).

    Attributes:
        items: read-only for callers.
    """

    def __init__(self) -> None:
        self.items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.items)

    def __getitem__(self, index: int) -> Sequence:
        return self.items[index]

    def add(self, seq: Sequence) -> None:
        insort(self.items, seq, key=_by_order)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence, found by its unique `order`."""
        del self.items[bisect_left(self.items, seq.order, key=_by_order)]
