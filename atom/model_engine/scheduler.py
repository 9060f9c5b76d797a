"""Decides what each step computes: a sequence's computed tokens catch up with its known tokens.

Prefill, chunked prefill, decode and resumption after preemption are one rule: a running sequence
computes the next known tokens that are not in the KV cache yet, and when these include its last
known token, a new token is sampled. Draft tokens are computed after the known ones; only accepted
ones count as computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from atom.batch import (
    NO_LOOKAHEAD,
    LaunchedStep,
    Lookahead,
    ScheduledBatch,
    ScheduledSequence,
    SequenceResult,
    StepOutput,
)
from atom.config import SchedulerOptions
from atom.kv_cache.cache_window import CacheWindow
from atom.messages import (
    EngineLimits,
    EngineRequest,
    EngineStats,
    FinishReason,
    RefusedSequence,
    RequestRefusedError,
    SequenceOutput,
    check_request,
)
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.scheduling.checkpoints import (
    Checkpoints,
    StatefulKVCacheManager,
    StatefulPrefixCache,
)
from atom.model_engine.scheduling.in_flight import InFlight
from atom.model_engine.scheduling.kv_cache_manager import KVCacheManager
from atom.model_engine.scheduling.planned_batch import PlannedBatch
from atom.model_engine.scheduling.prefix_cache import PrefixCache
from atom.model_engine.scheduling.scheduler_counts import SchedulerCounts
from atom.model_engine.scheduling.suspects import Suspects
from atom.model_engine.scheduling.window_pool import WindowPool
from atom.model_engine.scheduling.windows import WindowedKVCacheManager, WindowedPrefixCache
from atom.model_engine.sequence import Sequence, SequenceQueue, SequenceStatus


class Scheduler:
    """Continuous batching over one block pool.

    Each step calls `schedule`, then `update`, or `give_back` if the step failed; `add` and `abort`
    may be called at any time. One more step may be scheduled before the `update` of the last one:
    it goes on with the tokens that the last one samples, whatever they are, and has room for all
    that it may accept. Sequences are ordered by (priority, arrival): the first running
    sequence always makes progress, the last one is preempted when blocks run out, and waiting
    sequences are admitted in order. So every sequence finishes.

    After a failed step, the sequences of its batch are suspects: each half of them runs in a batch
    without other sequences until all have a new token. A half that fails is halved again, and a
    sequence that fails alone is refused.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        pool: BlockPool,
        limits: EngineLimits,
        eos_token_ids: frozenset[int],
        lookahead: Lookahead = NO_LOOKAHEAD,
    ) -> None:
        if (limits.num_blocks, limits.block_size) != (pool.num_blocks, pool.block_size):
            raise ValueError(
                f"the limits speak of {limits.num_blocks} blocks of {limits.block_size} tokens, "
                f"the pool has {pool.num_blocks} of {pool.block_size}"
            )
        self._options = options
        self._pool = pool
        self._prefixes, self._kv_cache_manager, self._windows = _create_caches(
            pool, options.max_num_seqs, limits, lookahead
        )
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._lookahead = lookahead
        self._counts = SchedulerCounts(limits, lookahead)
        self._live: dict[str, Sequence] = {}
        self._waiting = SequenceQueue()
        self._running = SequenceQueue()
        self._num_added = 0
        self._in_flight = InFlight()
        self._refused: list[RefusedSequence] = []
        self._suspects = Suspects()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestRefusedError: when it could never run as given, with the numbers.
            ValueError: when a live sequence has its id.
        """
        if request.id in self._live:
            raise ValueError(f"request id {request.id!r} is already in use by a live request")
        num_prompt = len(request.prompt_token_ids)
        check_request(request.prompt_token_ids, request.params, self._limits)
        budget = self._options.max_num_batched_tokens
        if not self._options.enable_chunked_prefill and num_prompt > budget:
            raise RequestRefusedError(
                f"the prompt has {num_prompt} tokens, a step takes max_num_batched_tokens="
                f"{budget} and chunked prefill is off; raise the one or enable the other",
                "prompt",
            )
        max_num_tokens = self._limits.max_model_len
        if request.params.max_tokens is not None:
            max_num_tokens = min(max_num_tokens, num_prompt + request.params.max_tokens)
        order = (request.priority, request.turn, self._num_added)
        seq = Sequence(request, order, max_num_tokens, self._eos_token_ids)
        self._num_added += 1
        self._live[request.id] = seq
        self._waiting.add(seq)

    def abort(self, ids: Iterable[str]) -> list[SequenceOutput]:
        """Abort sequences and free their blocks, once no batch in flight computes them; unknown ids
        are ignored.
        """
        outputs = []
        for id in ids:
            seq = self._live.get(id)
            if seq is not None:
                self._finish(seq)
                outputs.append(seq.report([], FinishReason.ABORT))
        return outputs

    def schedule(self, before: LaunchedStep | None = None) -> ScheduledBatch:
        """The next step's batch; empty when there are no unfinished sequences, or all of them wait
        for a batch in flight.

        Args:
            before: the step of the batch in flight; None if there is none.

        Raises:
            RuntimeError: when too many batches were passed to neither `update` nor `give_back`, or
                `before` is missing.
        """
        self._in_flight.check_room(before)
        plan = PlannedBatch(self._options.max_num_batched_tokens, before)
        is_ahead, has_suspects = bool(self._in_flight.batches), bool(self._suspects.groups)
        # Blocks that a preemption freed are for those who run.
        if (
            self._in_flight.can_be_followed(bool(self._lookahead.num_tokens))
            and not (has_suspects and (is_ahead or self._schedule_suspects(plan)))
            and not self._schedule_running(plan, before)
            and self._waiting.items
        ):
            self._admit(plan)
        if is_ahead and not plan.sequences:
            return plan.finish([])
        batch = plan.finish(self._kv_cache_manager.take_freed_rows())
        if plan.sequences:
            self._in_flight.add(batch, plan.sequences)
        return batch

    def update(self, batch: ScheduledBatch, output: StepOutput) -> list[SequenceOutput]:
        """Apply a step's results; returns new outputs in batch order.

        Sequences that were aborted during the step are ignored.

        Raises:
            RuntimeError: when `batch` is not in flight, or the results do not match it.
        """
        rows = self._in_flight.take(batch)
        if not len(rows) == len(batch.sequences) == len(output.sequences):
            raise RuntimeError(
                f"update() got {len(output.sequences)} results for a batch of "
                f"{len(batch.sequences)} sequences, and {len(rows)} are in flight for it"
            )
        outputs = []
        for seq, scheduled, result in zip(rows, batch.sequences, output.sequences, strict=True):
            if seq.status is SequenceStatus.RUNNING:
                made = self._advance(seq, scheduled, result)
                if made is not None:
                    outputs.append(made)
            elif not seq.launched:
                self._kv_cache_manager.free(seq)
        self._counts.step_ended(batch, output)
        return outputs

    def give_back(
        self, batch: ScheduledBatch, cause: str | None, *, one_by_one: bool = False
    ) -> None:
        """Undo a batch whose step did not complete, and all others in flight.

        All running sequences are preempted with the tokens known before the step. Whatever the step
        wrote to their blocks or to the runner is discarded, and the batches' `freed_rows` are sent
        again with the next one.

        Args:
            cause: the error that ended the step, which makes its sequences suspects; None when no
                sequence can have caused it.
            one_by_one: run each suspect alone instead of in halves.

        Raises:
            RuntimeError: when only other batches are in flight.
        """
        rows, ended, freed = self._in_flight.take_back(batch)
        self._kv_cache_manager.return_freed_rows(freed)
        for seq in ended:
            self._kv_cache_manager.free(seq)
        for seq in list(self._running):
            self._preempt(seq)
        if cause is None:
            return
        if len(rows) == 1 and rows[0] in self._suspects:
            self._refused.append(RefusedSequence(rows[0].request.id, cause, is_fault=True))
            self._finish(rows[0])
            return
        self._suspects.add(rows, one_by_one=one_by_one)

    def take_refused(self) -> list[RefusedSequence]:
        """The sequences refused by `update` or `give_back` since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def stats(self) -> EngineStats:
        """The current state, and totals since the start."""
        used = self._pool.num_used, 0 if self._windows is None else self._windows.num_used
        return self._counts.stats(len(self._running), len(self._waiting), *used)

    def check_integrity(self) -> None:
        """Check the pool's state, also against the live block tables and what they published.

        Raises:
            AssertionError: saying what is inconsistent.
        """
        self._pool.check_integrity()
        holders = [*self._live.values(), *self._in_flight.ended]
        self._pool.check_references(seq.block_ids for seq in holders)
        for seq in self._live.values():
            self._prefixes.check_integrity(seq)
        if self._windows is not None:
            held = [seq.block_ids[seq.windowed.start : seq.windowed.stop] for seq in holders]
            self._windows.check_integrity(held)

    def _schedule_running(self, plan: PlannedBatch, before: LaunchedStep | None) -> bool:
        """Schedule running sequences, preempting the last ones when blocks run out.

        Those wait for their results whose next token needs them, or who may have ended; and when
        blocks run out, one for whom a sequence in flight would have to be preempted.

        Returns:
            Whether blocks ran out.
        """
        running = self._running.items
        num_before, ran_out = len(running), False
        drafts_follow = bool(self._lookahead.num_tokens)
        index = 0
        while plan.budget > 0 and index < len(running):
            seq = running[index]
            index += 1
            # One token of the budget is kept for each later sequence, so a long prefill stalls no
            # decode.
            share = max(plan.budget - (len(running) - index), 1)
            if self._options.long_prefill_token_threshold:
                share = self._cut(share, seq)
            may_have_ended = seq.most_known >= seq.max_num_tokens
            if seq.launched.is_sampling and (may_have_ended or seq.must_wait(drafts_follow)):
                continue
            count, num_drafts = seq.next_tokens(share, before)
            if not self._reserve(seq, seq.most_computed + count + num_drafts):
                ran_out = True
                break
            plan.add(seq, count, num_drafts)
        return ran_out or len(running) < num_before

    def _cut(self, share: int, seq: Sequence) -> int:
        """What a sequence may have of `share` tokens of a step: a long prompt leaves some to the
        short ones that came later.
        """
        most = self._options.long_prefill_token_threshold
        return min(share, most) if 0 < most < seq.most_known - seq.most_computed else share

    def _reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Grow the block table to `num_tokens`; false if `seq` itself had to be preempted, or has
        to wait for one in flight.
        """
        while not self._kv_cache_manager.grow(seq, num_tokens):
            victim = self._running[-1]
            if victim.launched:
                return False
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._release(seq)
        seq.restart()
        self._waiting.add(seq)
        self._counts.preempted()

    def _admit(self, plan: PlannedBatch) -> None:
        """Start waiting sequences, strictly in order."""
        now = time.monotonic()
        while plan.budget > 0 and self._waiting:
            seq = self._waiting[0]
            if seq in self._suspects:
                return
            count = self._start(seq, self._cut(plan.budget, seq))
            if count == 0:
                return
            if seq.first_scheduled_time is None:
                seq.first_scheduled_time = now
            plan.start(seq, count)

    def _schedule_suspects(self, plan: PlannedBatch) -> bool:
        """Schedule the first group of suspects alone; false when there is no room for it.

        Sequences that passed this check keep their blocks; if they leave no room, they run on until
        there is some. A suspect gets blocks for all its known tokens when it starts, but for their
        parts for layers with a window.
        """
        for seq in self._suspects.groups[0].values():
            if plan.budget == 0:
                break
            if seq.status is SequenceStatus.RUNNING:
                count = min(len(seq.token_ids) - seq.num_computed, plan.budget)
                if not self._kv_cache_manager.grow(seq, seq.num_computed + count):
                    break
                plan.add(seq, count)
                continue
            count = self._start(seq, plan.budget)
            if count == 0:
                break
            plan.start(seq, count)
        return bool(plan.sequences)

    def _start(self, seq: Sequence, budget: int) -> int:
        """Move a waiting sequence to the running ones, if it fits.

        Leaves one free block for each running sequence: otherwise it would soon be preempted and
        its work lost.

        Returns:
            The number of its tokens to compute now; 0 when it has to wait.
        """
        # Without chunked prefill the first step must reach the end of the prompt.
        least = 0 if self._options.enable_chunked_prefill else seq.num_prompt_tokens
        count = self._kv_cache_manager.allocate(
            seq, budget, min_tokens=least, reserve_blocks=len(self._running)
        )
        if count == 0:
            return 0
        if seq.num_preemptions == 0 and self._prefixes.serves(seq):
            seq.num_cached_tokens = seq.num_computed
            self._counts.matched(seq)
        seq.status = SequenceStatus.RUNNING
        self._waiting.remove(seq)
        self._running.add(seq)
        return count

    def _advance(
        self, seq: Sequence, scheduled: ScheduledSequence, result: SequenceResult
    ) -> SequenceOutput | None:
        """Apply one sequence's results; None when there is no output."""
        token_ids, num_drafts = result.token_ids, scheduled.num_drafts
        seq.take_step(scheduled, result)
        if not scheduled.wants_sample:
            self._prefixes.publish(seq)
            return None
        if self._suspects.groups:
            self._suspects.discard(scheduled.id)
        if result.failure is not None and not token_ids:
            self._refuse(seq, result.failure)
            return None
        if len(seq.token_ids) == seq.num_prompt_tokens:
            self._counts.computed_prompt(seq)
        verified = None
        if num_drafts:
            num_accepted = len(token_ids) - (result.failure is None)
            verified = num_drafts, num_accepted, scheduled.draft_source
        num_new, finish_reason, stop_reason = seq.extend(token_ids)
        self._counts.generated(num_new, verified)
        # Tokens before the failure are dropped, unless they finish the sequence.
        if result.failure is not None and finish_reason is None:
            self._refuse(seq, result.failure)
            return None
        # Accepted drafts are in the KV cache; the newest token never is.
        seq.num_computed += min(max(num_new - 1, 0), num_drafts)
        self._prefixes.publish(seq)
        made = seq.report(token_ids[:num_new], finish_reason, stop_reason, verified)
        if seq.prompt_logprobs is not None:
            made.prompt_logprobs = seq.take_prompt_logprobs()
        if result.logprobs is not None:
            made.logprobs = result.logprobs[:num_new]
        if finish_reason is not None:
            self._finish(seq)
        return made

    def _refuse(self, seq: Sequence, failure: str) -> None:
        """End a sequence whose next token cannot be sampled."""
        has_grammar = seq.request.params.structured_output is not None
        param = "structured_output" if has_grammar else None
        self._refused.append(RefusedSequence(seq.request.id, failure, param))
        self._finish(seq)

    def _finish(self, seq: Sequence) -> None:
        """Remove a waiting or running sequence."""
        if seq.status is SequenceStatus.RUNNING:
            self._release(seq)
        else:
            self._waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        del self._live[seq.request.id]
        self._suspects.discard(seq.request.id)

    def _release(self, seq: Sequence) -> None:
        """Stop running a sequence; if it is in flight, it keeps blocks and row until it no longer
        is.
        """
        self._running.remove(seq)
        if not seq.launched:
            self._kv_cache_manager.free(seq)


def _create_caches(
    pool: BlockPool, num_rows: int, limits: EngineLimits, lookahead: Lookahead
) -> tuple[PrefixCache, KVCacheManager, WindowPool | None]:
    """What gives blocks to sequences; the pool of layers with a window if they have one."""
    successor = lookahead.kv_depends_on_successor
    if limits.state_slots:
        kept = StatefulPrefixCache(pool, successor, Checkpoints(limits.state_slots))
        return kept, StatefulKVCacheManager(pool, kept, num_rows, lookahead), None
    if limits.window is None:
        plain = PrefixCache(pool, successor)
        return plain, KVCacheManager(pool, plain, num_rows, lookahead), None
    windows = WindowPool(limits.window.num_blocks, pool)
    window = CacheWindow(limits.window.num_tokens, limits.window.tile, pool.block_size)
    prefixes = WindowedPrefixCache(pool, successor, windows, window)
    manager = WindowedKVCacheManager(pool, prefixes, num_rows, lookahead, windows)
    return prefixes, manager, windows
