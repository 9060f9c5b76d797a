"""Scheduler and pool under random load, with a runner that knows what each KV slot holds.

The runner writes into every slot what its KV would depend on: the cache salt and all tokens up
to the slot's position (and the one after it, for a drafter's KV). So a wrong prefix hit, a block
used by two, a chunk left out, a rejected draft kept or a block published too early shows as a
slot that does not hold what its reader needs. Layers with a window have slots of their own, where
the runner looks as far back as a kernel reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atom.batch import (
    Lookahead,
    NewSequence,
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
    FinishReason,
    RequestRefusedError,
    SequenceOutput,
    TokenLogprobs,
    WindowLimits,
)
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.scheduler import Scheduler
from atom.model_engine.scheduling.window_pool import WindowPool
from atom.sampling_params import SamplingParams

VOCAB = 12
EOS = frozenset({0})
Content = tuple[str, tuple[int, ...]]


def next_token(salt: str, tokens: tuple[int, ...]) -> int:
    """The model: a token that depends on everything before it."""
    state = len(salt)
    for token in tokens:
        state = (state * 31 + token + 7) % 1_000_003
    return state % VOCAB


def logprobs_of(token: int, position: int) -> TokenLogprobs:
    return TokenLogprobs([token], [-float(position)], [1])


class FakeRunner:
    """Computes batches as a model runner does, from what it was told and what the slots hold."""

    def __init__(
        self,
        block_size: int,
        lookahead: Lookahead,
        max_model_len: int,
        window: CacheWindow | None = None,
    ) -> None:
        self.window = window
        # Of each block its part for layers with a window, and what their slots hold.
        self.parts: dict[int, int] = {}
        self.window_slots: dict[int, Content] = {}
        # Who says which parts are held.
        self.windows: WindowPool | None = None
        self.block_size = block_size
        self.lookahead = lookahead
        self.max_model_len = max_model_len
        self.slots: dict[int, Content] = {}
        self.draft_slots: dict[int, Content] = {}
        self.told: dict[str, NewSequence] = {}
        self.tokens: dict[str, list[int]] = {}
        self.salts: dict[str, str] = {}
        # Of each row: the sequence that has it, and its block table.
        self.rows: dict[int, str] = {}
        self.tables: dict[int, list[int]] = {}
        # Rows that a failed step may have forgotten already, or never have heard of.
        self.told_in_vain: set[int] = set()

    def fail(self, batch: ScheduledBatch, salts: dict[str, str], *, late: bool) -> None:
        """A step that raises: before it begins, or late, with rubbish in the blocks it wrote to."""
        if late:
            self.step(batch, salts)
            for row in batch.sequences:
                for slot in self.slots_of(row)[row.start :]:
                    self.spoil(slot)
        self.told_in_vain |= {*batch.freed_rows, *(row.row for row in batch.sequences)}

    def spoil(self, slot: int) -> None:
        self.slots[slot] = self.draft_slots[slot] = "rubbish", ()
        # Blocks that wait for tokens have no part yet, or that of an earlier owner.
        if self.windows is not None and self.windows.ref_count(slot // self.block_size):
            self.window_slots[self.window_slot(slot)] = "rubbish", ()

    def window_slot(self, slot: int) -> int:
        block, offset = divmod(slot, self.block_size)
        return self.parts[block] * self.block_size + offset

    def step(self, batch: ScheduledBatch, salts: dict[str, str]) -> StepOutput:
        for row in batch.freed_rows:
            id = self.rows.pop(row, None)
            assert id is not None or row in self.told_in_vain
            if id is not None:
                del self.told[id], self.tokens[id], self.salts[id], self.tables[row]
        self.told_in_vain.clear()
        for new in batch.new:
            assert new.id not in self.told, "told twice"
            assert new.row not in self.rows, "the row has a sequence"
            self.rows[new.row] = new.id
            self.tables[new.row] = []
            self.told[new.id] = new
            self.tokens[new.id] = new.prompt_token_ids + new.output_token_ids
            self.salts[new.id] = salts[new.id]
        for sequence in batch.sequences:
            assert self.rows[sequence.row] == sequence.id
            self.tables[sequence.row] += sequence.new_block_ids
            assert len(self.tables[sequence.row]) == sequence.num_blocks
            assert (self.window is None) <= (sequence.new_windows is None)
            self.parts |= sequence.new_windows or {}
        for row in batch.sequences:
            self.check_slots(row, row.start)  # computed by earlier steps, not by this one
        for row in batch.sequences:
            self.write(row)
        for row in batch.sequences:
            self.check_slots(row, row.context_len)  # nobody overwrote another's slot
        return StepOutput([self.answer(row) for row in batch.sequences])

    def slots_of(self, row: ScheduledSequence) -> list[int]:
        table = self.tables[row.row]
        assert len(set(table)) == len(table)
        return [b * self.block_size + i for b in table for i in range(self.block_size)]

    def tokens_of(self, row: ScheduledSequence) -> list[int]:
        """The known tokens, and the drafts that this step verifies."""
        return self.tokens[row.id] + row.token_ids[len(row.token_ids) - row.num_drafts :]

    def check_slots(self, row: ScheduledSequence, length: int) -> None:
        salt, tokens, slots = self.salts[row.id], self.tokens_of(row), self.slots_of(row)
        assert len(slots) >= row.context_len
        for position, slot in enumerate(slots[:length]):
            assert self.slots.get(slot) == (salt, tuple(tokens[: position + 1]))
        if self.window is not None:
            oldest = max(row.start - self.window.num_tokens + 1, 0)
            for position in range(oldest // self.window.tile * self.window.tile, length):
                found = self.window_slots.get(self.window_slot(slots[position]))
                assert found == (salt, tuple(tokens[: position + 1]))
                assert self.windows is not None
                assert self.windows.ref_count(slots[position] // self.block_size)
        if self.lookahead.kv_depends_on_successor:
            for position, slot in enumerate(slots[: row.start]):
                assert self.draft_slots.get(slot) == (salt, tuple(tokens[: position + 2]))

    def write(self, row: ScheduledSequence) -> None:
        known, tokens, slots = self.tokens[row.id], self.tokens_of(row), self.slots_of(row)
        assert row.token_ids == tokens[row.start : row.context_len]
        assert 0 <= row.num_drafts < len(row.token_ids)
        end = row.context_len - row.num_drafts
        assert row.wants_sample == (end == len(known))
        assert row.num_drafts == 0 or row.wants_sample
        assert row.successor_token == (None if row.wants_sample else known[end])
        for position in range(row.start, row.context_len):
            content = self.salts[row.id], tuple(tokens[: position + 1])
            self.slots[slots[position]] = content
            if self.window is not None:
                self.window_slots[self.window_slot(slots[position])] = content

    def answer(self, row: ScheduledSequence) -> SequenceResult:
        known, new = tuple(self.tokens[row.id]), self.told[row.id]
        prompt_logprobs = None
        if new.params.prompt_logprobs is not None:
            last = min(row.context_len, len(new.prompt_token_ids) - 1)
            prompt_logprobs = [logprobs_of(known[p], p) for p in range(row.start + 1, last + 1)]
        if not row.wants_sample:
            self.propose(row, len(known))
            return SequenceResult([], prompt_logprobs=prompt_logprobs)
        first = len(known)
        for draft in [*row.token_ids[len(row.token_ids) - row.num_drafts :], None]:
            known = (*known, next_token(self.salts[row.id], known))
            if known[-1] != draft:
                break
        self.tokens[row.id] = list(known)
        return SequenceResult(
            list(known[first:]),
            [logprobs_of(known[p], p) for p in range(first, len(known))],
            prompt_logprobs,
            self.propose(row, len(known) - 1),
        )

    def propose(self, row: ScheduledSequence, num_computed: int) -> list[int]:
        """Write the drafter's KV and make drafts: some right ones, then perhaps a wrong one."""
        salt, known, slots = self.salts[row.id], self.tokens[row.id], self.slots_of(row)
        num_computed = min(num_computed, row.context_len)
        for position in range(row.start, num_computed):
            self.draft_slots[slots[position]] = salt, tuple(known[: position + 2])
        if not row.wants_sample:
            return []
        k, params = self.lookahead.num_tokens, self.told[row.id].params
        # A draft is made from the KV of all tokens before it, but for the last one's.
        most = self.max_model_len
        if params.max_tokens is not None:
            most = min(most, len(self.told[row.id].prompt_token_ids) + params.max_tokens)
        assert len(slots) >= min(len(known) + k - 1, most - 1)
        for position in range(num_computed, min(num_computed + k - 1, len(slots))):
            self.draft_slots[slots[position]] = "", ()
        drafts: list[int] = []
        for _ in range(len(known) % (k + 1)):
            drafts.append(next_token(salt, (*known, *drafts)))
        if len(drafts) < k and len(known) % 2:
            drafts.append((next_token(salt, (*known, *drafts)) + 1) % VOCAB)
        return drafts


@dataclass
class Expected:
    """What a request gives when it runs alone."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None


def run_alone(request: EngineRequest, max_model_len: int) -> Expected:
    """The stop rules once more, as plainly as possible."""
    params = request.params
    outputs: list[int] = []
    while True:
        token = next_token(request.cache_salt, (*request.prompt_token_ids, *outputs))
        can_stop = len(outputs) >= params.min_tokens
        outputs.append(token)
        if can_stop and token in EOS and not params.ignore_eos:
            return Expected(outputs, FinishReason.STOP, None)
        if can_stop and token in (params.stop_token_ids or []):
            return Expected(outputs, FinishReason.STOP, token)
        full = len(request.prompt_token_ids) + len(outputs) == max_model_len
        if full or len(outputs) == params.max_tokens:
            return Expected(outputs, FinishReason.LENGTH, None)


@dataclass
class Client:
    """Collects one request's outputs, as a frontend would."""

    request: EngineRequest
    outputs: list[SequenceOutput] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    def take(self, output: SequenceOutput) -> None:
        assert all(o.finish_reason is None for o in self.outputs), "output after the end"
        self.outputs.append(output)

    def check(self, max_model_len: int) -> None:
        expected = run_alone(self.request, max_model_len)
        prompt, last = self.request.prompt_token_ids, self.outputs[-1]
        if last.finish_reason is FinishReason.ABORT:
            assert last.token_ids == []
            assert self.token_ids == expected.token_ids[: len(self.token_ids)]
            return
        assert self.token_ids == expected.token_ids
        assert last.finish_reason is expected.finish_reason
        assert last.stop_reason == expected.stop_reason
        assert all(output.token_ids for output in self.outputs)
        logprobs = [entry for output in self.outputs for entry in output.logprobs or []]
        first = len(prompt)
        assert logprobs == [logprobs_of(t, first + i) for i, t in enumerate(self.token_ids)]
        wanted = None
        if self.request.params.prompt_logprobs is not None:
            wanted = [None, *(logprobs_of(t, p) for p, t in enumerate(prompt) if p)]
        assert [o.prompt_logprobs for o in self.outputs] == [wanted] + [None] * (
            len(self.outputs) - 1
        )
        assert {o.num_cached_tokens for o in self.outputs} == {self.outputs[0].num_cached_tokens}
        assert last.num_cached_tokens < len(prompt)
        assert last.num_cached_tokens == 0 or wanted is None
        assert last.first_scheduled_time is not None


PREFIXES = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9], [5])
prompts = st.builds(
    lambda prefix, length, suffix: (prefix[:length] + suffix) or [3],
    st.sampled_from(PREFIXES),
    st.integers(2, 8),
    st.lists(st.integers(0, 2), max_size=4),
)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 12)))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(max_tokens or 3, 3))),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([None, [0], [3, 4]])),
        logprobs=0,
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        # The runner below heeds neither, but with them steps may have to wait for results.
        bad_word_ids=draw(st.sampled_from([None, None, None, [[7, 8]]])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.0, 1.1])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    started = False
    depth = 1

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from([1, 2, 3, 4]),
        caching=st.booleans(),
        max_model_len=st.integers(8, 26),
        max_num_batched_tokens=st.integers(1, 24),
        max_num_seqs=st.integers(1, 5),
        chunked=st.booleans(),
        threshold=st.sampled_from([0, 0, 1, 4]),
        num_drafts=st.sampled_from([0, 0, 1, 3]),
        successor=st.booleans(),
        window_tokens=st.sampled_from([0, 0, 1, 2, 5]),
        tile=st.sampled_from([1, 1, 3]),
        spare_parts=st.integers(0, 3),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        caching: bool,
        max_model_len: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        chunked: bool,
        threshold: int,
        num_drafts: int,
        successor: bool,
        window_tokens: int,
        tile: int,
        spare_parts: int,
    ) -> None:
        window = limits = None
        if window_tokens:
            window = CacheWindow(window_tokens, tile, block_size)
            # What the first sequence may need.
            most = window_tokens + tile + self.depth * max_num_batched_tokens
            parts = min(-(-most // block_size) + 1 + spare_parts, num_blocks)
            limits = WindowLimits(window_tokens, tile, parts)
        self.limits = EngineLimits(
            max_model_len=min(max_model_len, num_blocks * block_size + 1),
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=VOCAB,
            max_logprobs=1,
            window=limits,
        )
        self.options = SchedulerOptions(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=threshold if chunked else 0,
        )
        self.pool = BlockPool(num_blocks, block_size, caching)
        lookahead = Lookahead(num_drafts, kv_depends_on_successor=successor and num_drafts > 0)
        self.scheduler = Scheduler(self.options, self.pool, self.limits, EOS, lookahead)
        self.runner = FakeRunner(block_size, lookahead, self.limits.max_model_len, window)
        self.runner.windows = self.scheduler._windows
        self.live: dict[str, Client] = {}
        self.done: list[Client] = []
        self.num_added = 0
        # The token that a sequence's stop string ends with; its frontend aborts it then.
        self.stops: dict[str, int] = {}
        # Who has failed and has not had a token since.
        self.suspects: set[str] = set()
        self.started = True

    # --- rules ---

    @rule(
        prompt=prompts,
        params=sampling_params(),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from(["", "", "s"]),
    )
    def add(self, prompt: list[int], params: SamplingParams, priority: int, salt: str) -> None:
        self.num_added += 1
        self.submit(str(self.num_added), prompt, params, priority, salt)

    @rule(prompt=prompts, params=sampling_params(), count=st.integers(2, 4), both=st.booleans())
    def add_several(
        self, prompt: list[int], params: SamplingParams, count: int, both: bool
    ) -> None:
        """As `n` of one request does: the same prompt at once."""
        self.num_added += 1
        for i in range(count):
            self.submit(f"{self.num_added}/{i}", prompt, params, 0, "s" if both and i else "")

    @rule(prompt=prompts, params=sampling_params(), stop=st.integers(0, VOCAB - 1))
    def add_with_stop_string(self, prompt: list[int], params: SamplingParams, stop: int) -> None:
        self.num_added += 1
        self.stops[str(self.num_added)] = stop
        self.submit(str(self.num_added), prompt, params, 0, "")

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.finish_step(*self.begin_step())

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.abort_some(data)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), prompt=prompts, params=sampling_params())
    def abort_in_flight(
        self, data: st.DataObject, prompt: list[int], params: SamplingParams
    ) -> None:
        batch, output = self.begin_step()
        for id in self.abort_some(data):
            # The id is free again at once, and its new owner must not get the old one's tokens.
            self.submit(id, prompt, params, 0, "s")
        self.finish_step(batch, output)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), late=st.booleans(), blames=st.booleans(), aborts=st.booleans())
    def step_raises(self, data: st.DataObject, late: bool, blames: bool, aborts: bool) -> None:
        batch = self.schedule()
        self.runner.fail(batch, self.salts(), late=late)
        if aborts:
            self.abort_some(data)
        self.scheduler.give_back(batch, "it broke" if blames else None)
        self.scheduler.check_integrity()
        self.assert_nothing_held()
        ids = {row.id for row in batch.sequences if row.id in self.live} if blames else set()
        refused = self.scheduler.take_refused()
        assert {r.id for r in refused} == (ids & self.suspects if len(ids) == 1 else set())
        assert all(r.is_fault and r.message == "it broke" for r in refused)
        self.suspects |= ids
        self.suspects -= {r.id for r in refused}
        self.done += [self.live.pop(r.id) for r in refused]

    # --- what the rules do ---

    def submit(
        self, id: str, prompt: list[int], params: SamplingParams, priority: int, salt: str
    ) -> None:
        request = EngineRequest(
            id=id,
            prompt_token_ids=prompt,
            params=params,
            seed=0,
            priority=priority,
            cache_salt=salt,
        )
        try:
            self.scheduler.add(request)
        except RequestRefusedError:
            return
        self.live[id] = Client(request)

    def abort_some(self, data: st.DataObject) -> list[str]:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.live)), max_size=3, unique=True))
        outputs = self.scheduler.abort([*ids, "nobody"])
        assert [output.id for output in outputs] == ids
        for output in outputs:
            assert output.finish_reason is FinishReason.ABORT
            self.take(output)
        return ids

    def salts(self) -> dict[str, str]:
        return {id: client.request.cache_salt for id, client in self.live.items()}

    def begin_step(self) -> tuple[ScheduledBatch, StepOutput]:
        batch = self.schedule()
        return batch, self.runner.step(batch, self.salts())

    def schedule(self) -> ScheduledBatch:
        preemptions = self.scheduler.stats().num_preemptions
        batch = self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert bool(batch.sequences) == bool(self.live)
        assert batch.num_tokens <= self.options.max_num_batched_tokens
        assert len(batch.sequences) <= self.options.max_num_seqs
        if self.scheduler.stats().num_preemptions > preemptions:
            assert batch.new == []
        for row in batch.sequences:
            num_prompt = len(self.live[row.id].request.prompt_token_ids)
            if not self.options.enable_chunked_prefill and row.start < num_prompt:
                assert row.context_len >= num_prompt
        assert len({row.id in self.suspects for row in batch.sequences}) <= 1
        return batch

    def finish_step(self, batch: ScheduledBatch, output: StepOutput) -> None:
        stopped = []
        for made in self.scheduler.update(batch, output):
            self.take(made)
            self.suspects.discard(made.id)
            if self.stops.get(made.id) in made.token_ids and made.id in self.live:
                stopped.append(made.id)
        for aborted in self.scheduler.abort(stopped):
            self.take(aborted)
        self.scheduler.check_integrity()

    def take(self, output: SequenceOutput) -> None:
        client = self.live[output.id]
        client.take(output)
        if output.finish_reason is not None:
            client.check(self.limits.max_model_len)
            self.done.append(self.live.pop(output.id))
            self.suspects.discard(output.id)

    def assert_nothing_held(self) -> None:
        assert self.pool.num_used == self.scheduler.stats().num_used_window_blocks == 0

    # --- what holds always ---

    @invariant()
    def counts_agree(self) -> None:
        stats = self.scheduler.stats()
        assert self.scheduler.has_unfinished == bool(self.live)
        assert stats.num_running + stats.num_waiting == len(self.live)
        assert stats.num_running <= self.options.max_num_seqs
        assert stats.num_used_blocks == self.pool.num_used
        clients = [*self.live.values(), *self.done]
        assert stats.num_generation_tokens == sum(len(c.token_ids) for c in clients)
        prompts_done = [c.request.prompt_token_ids for c in clients if c.token_ids]
        assert stats.num_prompt_tokens == sum(len(p) for p in prompts_done)
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries

    def teardown(self) -> None:
        if not self.started:  # a run may end before its first rule
            return
        # Until the first of those left runs, who runs finishes; then it progresses every step.
        a_life = (self.options.max_num_seqs + 1) * self.limits.max_model_len
        # Before that, each suspect runs alone.
        bound = len(self.live) * (a_life + self.limits.max_model_len)
        for _ in range(bound):
            if not self.live:
                break
            self.finish_step(*self.begin_step())
        assert not self.live, f"{len(self.live)} sequences have not finished in {bound} steps"
        self.assert_nothing_held()
        self.begin_step()
        assert self.runner.told == {}, "the runner was not told to forget"


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.slow
class TestSchedulerForLong(TestScheduler):
    settings = settings(TestScheduler.settings, max_examples=1000)
