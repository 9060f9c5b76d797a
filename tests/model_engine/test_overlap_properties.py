"""The scheduler with a batch in flight while it schedules the next, under random load.

The runner is that of `test_scheduler_properties`, and computes a step when it is launched: it knows
what the last one sampled, as a device does, while the scheduler learns it later.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule
from test_scheduler_properties import (
    VOCAB,
    FakeRunner,
    SchedulerMachine,
    TestScheduler,
    next_token,
    prompts,
    sampling_params,
)

from atom.batch import LaunchedStep, NewSequence, ScheduledBatch, ScheduledSequence, StepOutput
from atom.sampling_params import SamplingParams


class Device(FakeRunner):
    """A runner that goes on from its own results. It names a sequence by id and row, since an id
    may have a new owner while the old one is in flight.
    """

    def __init__(self, *limits: Any) -> None:
        super().__init__(*limits)
        self.num_steps = self.num_made = self.num_verified = 0
        # Of each sequence, the drafts that its last step left.
        self.left: dict[str, list[int]] = {}
        # Steps that may be given back: rows and freed rows, and where each row begins.
        self.launched: deque[tuple[ScheduledBatch, dict[int, int]]] = deque()

    def launch(self, batch: ScheduledBatch, salts: dict[str, str]) -> LaunchedStep:
        self.num_steps += 1
        self.num_made = self.num_steps % (self.lookahead.num_tokens + 1)
        # In most steps fewer than there are.
        self.num_verified = min(self.num_made, self.num_steps // 3 % 4)
        salts = {name_of(s): salts[s.id] for s in batch.new}
        new = [msgspec.structs.replace(s, id=name_of(s)) for s in batch.new]
        sequences = [self.resolve(s) for s in batch.sequences]
        output = self.step(ScheduledBatch(sequences, new, batch.freed_rows), salts)
        self.launched.append((batch, {s.row: s.start for s in sequences}))
        return LaunchedStep(self.collect(batch, output), self.num_verified, "device")

    def collect(self, batch: ScheduledBatch, output: StepOutput) -> Any:
        def arrive() -> StepOutput:
            self.launched.popleft()
            behind = self.launched[0][0].sequences if self.launched else []
            ahead = {s.row: s for s in behind if s.is_ahead}
            results = list(output.sequences)
            for i, row in enumerate(batch.sequences):
                results[i] = msgspec.structs.replace(
                    results[i], tokens_lost_by_overlap=self.num_steps % 5 / 9
                )
                if row.row in ahead:
                    later = self.look_up(ahead[row.row])
                    results[i] = msgspec.structs.replace(
                        results[i], draft_token_ids=[], drafts_after_next=later
                    )
            return StepOutput(results)

        return arrive

    def look_up(self, launched: ScheduledSequence) -> tuple[list[int], str] | None:
        """Drafts behind what a launched step brings, of which the first ones are right; in some
        steps none.
        """
        known = self.tokens[name_of(launched)]
        if not self.lookahead.num_tokens or not (num := (len(known) + self.num_steps) % 5):
            return None
        drafts: list[int] = []
        for i in range(num):
            right = next_token(self.salts[name_of(launched)], (*known, *drafts))
            drafts.append(right if i < len(known) % 3 else (right + 1) % VOCAB)
        return drafts, "lookup"

    def resolve(self, row: ScheduledSequence) -> ScheduledSequence:
        """With the tokens and the place that are on the device."""
        id = name_of(row)
        if not row.is_ahead:
            return msgspec.structs.replace(row, id=id)
        known = self.tokens[id]
        assert len(known) - 1 <= row.start, "the start is the most that it may be"
        params = self.told[id].params
        assert not params.bad_word_ids, "its next token needs the last one"
        assert not (params.repetition_penalty != 1 and self.lookahead.num_tokens)
        drafts = row.draft_token_ids if row.knows_drafts else self.left[id][: row.num_drafts]
        assert row.knows_drafts == (row.draft_source == "lookup")
        token_ids = [known[-1], *drafts]
        assert len(row.token_ids) == len(token_ids) == row.num_drafts + 1
        assert len(self.tables[row.row] + row.new_block_ids) * self.block_size >= row.context_len
        return msgspec.structs.replace(
            row,
            id=id,
            token_ids=token_ids,
            start=len(known) - 1,
            is_ahead=False,
            knows_drafts=False,
        )

    def propose(self, row: ScheduledSequence, num_computed: int) -> list[int]:
        """As many drafts of everyone, of which the first ones are right."""
        super().propose(row, num_computed)
        drafts: list[int] = []
        known = self.tokens[row.id]
        for i in range(self.num_made if row.wants_sample else 0):
            right = next_token(self.salts[row.id], (*known, *drafts))
            drafts.append(right if i < len(known) % 4 else (right + 1) % VOCAB)
        self.left[row.id] = drafts
        return drafts[: self.num_verified]

    def lose(self, failed: ScheduledBatch) -> None:
        """Rubbish where steps have written that are given back."""
        for batch, starts in self.launched:
            for row, start in starts.items():
                size, table = self.block_size, self.tables[row]
                for position in range(start, len(table) * size):
                    slot = table[position // size] * size + position % size
                    self.spoil(slot)
            self.told_in_vain |= {*batch.freed_rows, *starts}
        self.told_in_vain |= {*failed.freed_rows, *(s.row for s in failed.sequences)}
        self.launched.clear()


def name_of(sequence: ScheduledSequence | NewSequence) -> str:
    return f"{sequence.id}/{sequence.row}"


class OverlapMachine(SchedulerMachine):
    """Launches a batch before the results of the last one are read, where the scheduler can."""

    device: Device
    depth = 2

    def prepare(self) -> None:
        if not hasattr(self, "flights"):
            self.device = Device(
                self.runner.block_size,
                self.runner.lookahead,
                self.runner.max_model_len,
                self.runner.window,
            )
            self.device.windows = self.runner.windows
            self.runner = self.device
            self.flights: deque[tuple[ScheduledBatch, LaunchedStep]] = deque()
            # Batches in flight, and ids whose owner there is not the one that lives.
            self.left_behind: list[tuple[ScheduledBatch, str]] = []

    def launch(self) -> bool:
        self.prepare()
        batch = self.schedule()
        if not batch.sequences and self.flights:
            return False
        self.flights.append((batch, self.device.launch(batch, self.salts())))
        return True

    def schedule(self) -> ScheduledBatch:
        self.prepare()
        before = self.flights[-1][1] if self.flights else None
        batch = self.scheduler.schedule(before)
        self.scheduler.check_integrity()
        assert batch.sequences or self.flights or not self.live
        assert batch.num_tokens <= self.options.max_num_batched_tokens
        assert len(batch.sequences) <= self.options.max_num_seqs
        return batch

    def collect(self) -> None:
        batch, launched = self.flights.popleft()
        self.finish_step(batch, launched.collect())

    def pump(self) -> None:
        self.prepare()
        while len(self.flights) < 2 and self.launch():
            pass
        self.collect()

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.pump()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), prompt=prompts, params=sampling_params(), both=st.booleans())
    def abort_in_flight(
        self, data: st.DataObject, prompt: list[int], params: SamplingParams, both: bool = True
    ) -> None:
        self.prepare()
        while len(self.flights) < 1 + both and self.launch():
            pass
        for id in self.abort_some(data):
            # The id is free again at once, and its new owner must not get the old one's tokens.
            self.left_behind += [(batch, id) for batch, _ in self.flights]
            self.submit(id, prompt, params, 0, "s")
        self.collect()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), late=st.booleans(), blames=st.booleans(), aborts=st.booleans())
    def step_raises(self, data: st.DataObject, late: bool, blames: bool, aborts: bool) -> None:
        """When it is launched, or later, when another one runs behind it."""
        self.prepare()
        if late:
            while len(self.flights) < 2 and self.launch():
                pass
            failed = self.flights[0][0]
        else:
            failed = self.schedule()
            if not failed.sequences:
                return
        self.device.lose(failed)
        self.flights.clear()
        if aborts:
            self.abort_some(data)
        self.scheduler.give_back(failed, "it broke" if blames else None)
        self.scheduler.check_integrity()
        self.assert_nothing_held()
        others = {id for batch, id in self.left_behind if batch is failed}
        ids = {s.id for s in failed.sequences if s.id in self.live} - others if blames else set()
        refused = self.scheduler.take_refused()
        assert {r.id for r in refused} == (ids & self.suspects if len(ids) == 1 else set())
        self.suspects |= ids
        self.suspects -= {r.id for r in refused}
        self.done += [self.live.pop(r.id) for r in refused]

    def teardown(self) -> None:
        if not self.started:
            return
        self.prepare()
        a_life = (self.options.max_num_seqs + 1) * self.limits.max_model_len
        bound = 3 * len(self.live) * (a_life + self.limits.max_model_len)
        for _ in range(bound):
            if not self.live:
                break
            self.pump()
        assert not self.live, f"{len(self.live)} sequences have not finished in {bound} steps"
        while self.flights:
            self.collect()
        self.assert_nothing_held()
        self.launch()
        assert self.device.told == {}, "the runner was not told to forget"


TestOverlap = OverlapMachine.TestCase
TestOverlap.settings = settings(TestScheduler.settings, max_examples=50)


@pytest.mark.slow
class TestOverlapForLong(TestOverlap):
    settings = settings(TestOverlap.settings, max_examples=500)


del TestScheduler, SchedulerMachine  # they run in their own file
