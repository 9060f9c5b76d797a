"""The scheduler, prefix caching and the pool of recurrent states under random load.

The runner is that of `test_overlap_properties`, whose slots know what KV they hold, with a layer
whose state is a hash of all tokens before. Whatever is scheduled, preempted, aborted, given back or
found in the cache, every token must find the state of those before it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
import torch
from kv_cache.hashes import Hashes, hash_of
from test_overlap_properties import Device
from test_scheduler_properties import EOS, VOCAB, Client

from atom.batch import (
    LaunchedStep,
    Lookahead,
    ScheduledBatch,
    ScheduledSequence,
    StepOutput,
)
from atom.config import SchedulerOptions
from atom.kv_cache.state_pool import StatePool
from atom.messages import EngineLimits, EngineRequest, FinishReason, SequenceOutput
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.scheduler import Scheduler
from atom.model_engine.scheduling import checkpoints
from atom.model_engine.scheduling.checkpoints import StatefulPrefixCache
from atom.model_ops.attention.metadata import StateMetadata
from atom.sampling_params import SamplingParams

JUNK = -7
# Operations between two times that everything has ended.
EPISODE = 250
PREFIXES = [[random.Random(n).randrange(1, VOCAB) for _ in range(24)] for n in range(3)]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "LEAST_TOKENS", 3)


class StatefulDevice(Device):
    """It keeps states as a model runner does: `StatePool.start`, then the layers."""

    def __init__(self, num_rows: int, num_slots: int, *limits: Any) -> None:
        super().__init__(*limits)
        self.layer, self.num_rows = Hashes(), num_rows
        # `Device.look_up` finds up to 4, whatever the drafter makes.
        most = max(self.lookahead.num_tokens, 4) if self.lookahead.num_tokens else 0
        self.states = StatePool([self.layer], num_rows, most, torch.device("cpu"), num_slots)
        self.states.allocate()
        # What rows hold before they are written must not matter.
        self.forget([*range(num_rows + 1)])
        self.seen: Counter[str] = Counter()

    def forget(self, rows: list[int]) -> None:
        self.layer.hashes[rows], self.layer.tokens[rows] = JUNK, JUNK

    def step(self, batch: ScheduledBatch, salts: dict[str, str]) -> StepOutput:
        self.states.start(batch)
        self.seen["loaded"] += sum(s.load_state is not None for s in batch.sequences)
        self.seen["kept"] += sum(s.keep_state is not None for s in batch.sequences)
        return super().step(batch, salts)

    def write(self, row: ScheduledSequence) -> None:
        """One sequence's part of a step; every other one is padded, as graphs are."""
        super().write(row)
        tokens = self.tokens_of(row)
        padding = 2 * (self.num_steps % 2)
        count = row.context_len - row.start + padding
        found = self.layer.step(
            [*row.token_ids, *[1] * padding],
            StateMetadata(
                rows=torch.tensor([row.row]),
                context_lens=torch.tensor([row.start + count]),
                cu_seqlens_q=torch.tensor([0, count]),
                padding_lens=torch.tensor([padding]) if padding else None,
                query_lens_cpu=(count,),
            ),
        )
        for i, position in enumerate(range(row.start, row.context_len)):
            assert found[i] == hash_of(tokens[: position + 1]), (row, position)
            self.seen["checked"] += 1
        self.seen["drafts"] += row.num_drafts

    def lose(self, failed: ScheduledBatch) -> None:
        rows = {s.row for batch, _ in self.launched for s in batch.sequences}
        super().lose(failed)
        self.forget(sorted(rows))


class Load:
    """Random requests to a scheduler with random limits, and what happened.

    Args:
        depth: steps under way at once.
    """

    def __init__(self, seed: int, depth: int) -> None:
        draw = self.draw = random.Random(seed)
        self.depth = depth
        num_blocks, block_size = draw.randint(12, 24), draw.choice([2, 3, 4])
        max_num_seqs, slots = draw.randint(1, 5), draw.choice([1, 3, 8])
        self.limits = EngineLimits(
            max_model_len=min(40, num_blocks * block_size - 8),
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=VOCAB,
            max_logprobs=1,
            state_slots=slots,
        )
        self.options = SchedulerOptions(
            max_num_batched_tokens=draw.randint(4, 32), max_num_seqs=max_num_seqs
        )
        self.pool = BlockPool(num_blocks, block_size, True)
        num_drafts = draw.choice([0, 1, 3, 7])
        lookahead = Lookahead(num_drafts, kv_depends_on_successor=draw.random() < 0.5)
        if not num_drafts:
            lookahead = Lookahead(0)
        self.scheduler = Scheduler(self.options, self.pool, self.limits, EOS, lookahead)
        sizes = block_size, lookahead, self.limits.max_model_len
        self.device = StatefulDevice(max_num_seqs, slots, *sizes)
        self.flights: deque[tuple[ScheduledBatch, LaunchedStep]] = deque()
        self.live: dict[str, Client] = {}
        self.num_added = 0
        self.happened = self.device.seen

    def run(self, operations: int) -> None:
        for _ in range(operations):
            kind = self.draw.random()
            if kind < 0.2 and len(self.live) < 9:
                self.add()
            elif kind < 0.23 and self.live:
                self.abort()
            elif kind < 0.25 and self.live:
                self.fail()
            else:
                self.pump()
        while self.live or self.flights:
            self.pump()
        prefixes = self.scheduler._prefixes
        assert isinstance(prefixes, StatefulPrefixCache)
        assert prefixes._checkpoints.num_reserved == 0
        assert self.pool.num_used == 0
        self.happened["preempted"] += self.scheduler.stats().num_preemptions

    def add(self) -> None:
        draw = self.draw
        self.num_added += 1
        prefix = draw.choice(PREFIXES)[: draw.randint(1, 24)]
        tokens = [*prefix, *(draw.randrange(1, VOCAB) for _ in range(draw.randint(0, 6)))]
        tokens = tokens[: self.limits.max_model_len - 2]
        most = min(draw.randint(1, 14), self.limits.max_model_len - len(tokens))
        request = EngineRequest(
            id=str(self.num_added),
            prompt_token_ids=tokens,
            params=SamplingParams(max_tokens=most, logprobs=0),
            seed=0,
            priority=draw.choice([0, 0, 0, 1, -1]),
            cache_salt=draw.choice(["", "", "", "s"]),
        )
        self.scheduler.add(request)
        self.live[request.id] = Client(request)

    def abort(self) -> None:
        for output in self.scheduler.abort(
            self.draw.sample(sorted(self.live), self.draw.randint(1, min(2, len(self.live))))
        ):
            self.happened["aborted"] += 1
            self.take(output)

    def fail(self) -> None:
        """A step raises when others may be under way."""
        while len(self.flights) < self.depth and self.launch():
            pass
        if not self.flights:
            return
        failed = self.flights[0][0]
        self.device.lose(failed)
        self.flights.clear()
        self.scheduler.give_back(failed, None)
        self.scheduler.check_integrity()
        self.happened["given back"] += 1

    def launch(self) -> bool:
        before = self.flights[-1][1] if self.flights else None
        batch = self.scheduler.schedule(before)
        self.scheduler.check_integrity()
        if not batch.sequences and self.flights:
            return False
        salts = {id: client.request.cache_salt for id, client in self.live.items()}
        self.flights.append((batch, self.device.launch(batch, salts)))
        return bool(batch.sequences)

    def pump(self) -> None:
        while len(self.flights) < self.depth and self.launch():
            pass
        batch, launched = self.flights.popleft()
        output = launched.collect()
        for s, result in zip(batch.sequences, output.sequences, strict=True):
            if s.num_drafts:
                self.happened["accepted"] += len(result.token_ids) - 1
        for made in self.scheduler.update(batch, output):
            self.take(made)
        self.scheduler.check_integrity()

    def take(self, output: SequenceOutput) -> None:
        client = self.live[output.id]
        client.take(output)
        if output.finish_reason is None:
            return
        client.check(self.limits.max_model_len)
        if output.finish_reason is not FinishReason.ABORT:
            self.happened["cached"] += output.num_cached_tokens or 0
        del self.live[output.id]


def run(operations: int, seed: int) -> Counter[str]:
    """What happened in so many operations, in episodes with other limits each."""
    happened: Counter[str] = Counter()
    for episode in range(-(-operations // EPISODE)):
        load = Load(1000 * seed + episode, 1 + episode % 2)
        load.run(EPISODE)
        happened += load.happened
    return happened


KINDS = ("checked", "drafts", "accepted", "loaded", "kept", "cached", "preempted", "aborted")


def test_random_operations() -> None:
    happened = run(2000, 1)
    assert all(happened[kind] > 10 for kind in (*KINDS, "given back")), happened
    assert happened["accepted"] < happened["drafts"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_a_hundred_thousand_random_operations(seed: int) -> None:
    happened = run(25_000, seed)
    assert all(happened[kind] > 500 for kind in KINDS), happened


@pytest.mark.parametrize("fault", ["stale slot", "version", "no load", "early hit"])
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = StatePool.start

    def broken(self: StatePool, batch: ScheduledBatch) -> None:
        if fault == "stale slot":
            self._to_keep = []
        if fault == "version":
            self._to_keep = [(row, tokens + 1, slot) for row, tokens, slot in self._to_keep]
        if fault == "no load":
            batch = ScheduledBatch([], [], [])
        start(self, batch)

    monkeypatch.setattr(StatePool, "start", broken)
    if fault == "early hit":
        monkeypatch.setattr(
            checkpoints.Checkpoints, "__contains__", lambda self, _: bool(self._published)
        )
        monkeypatch.setattr(
            checkpoints.Checkpoints, "find", lambda self, _: next(iter(self._published.values()))
        )
    with pytest.raises(AssertionError):
        run(2000, 1)
