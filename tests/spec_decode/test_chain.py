"""The single-token steps of a draft: where they write, and that a graph does the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draft_bench import CPU, HIDDEN, MHA, MLA, VOCAB, DraftBench, draft_tensors, load, write_draft
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.graphs.capture import GraphPlan, ReexecuteBackend
from atom.model_ops.metadata import AttentionMetadata, SamplingMetadata
from atom.spec_decode.base import Guide
from atom.spec_decode.chain import ChainStart, DraftChain
from atom.spec_decode.choice import Chosen, DraftChoice
from atom.spec_decode.eagle import EagleProposer

BLOCK_SIZE, MAX_MODEL_LEN, STEPS = 4, 30, 3


class Recorder:
    """A draft step that predicts the token after the last and keeps the metadata it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, AttentionMetadata]] = []

    def __call__(
        self,
        place: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        race: SamplingMetadata | None,
        guide: Guide | None,
    ) -> tuple[Chosen, torch.Tensor]:
        assert place == len(self.seen) + 1
        self.seen.append((positions, metadata))
        return Chosen(token_ids + 1), hidden


def start_at(
    positions: Sequence[int], tables: list[list[int]], race: SamplingMetadata | None = None
) -> ChainStart:
    """Chains whose first tokens are at `positions`, over block tables of any length."""
    width = max(map(len, tables))
    count = len(positions)
    generator = torch.Generator().manual_seed(sum(positions))
    return ChainStart(
        token_ids=torch.randint(0, VOCAB, (count,), generator=generator),
        hidden=torch.randn(count, HIDDEN, generator=generator),
        positions=torch.tensor(positions) - 1,
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        block_counts=torch.tensor([len(t) for t in tables], dtype=torch.int32),
        max_context_len=min(max(positions) + STEPS, MAX_MODEL_LEN),
        race=race,
    )


def race_of(seeds: Sequence[int], *, filters: bool) -> SamplingMetadata:
    """The first row is greedy."""
    count = len(seeds)
    return SamplingMetadata(
        temperature=torch.arange(count) * 0.7,
        top_k=torch.full((count,), 40, dtype=torch.int32) if filters else None,
        top_p=torch.full((count,), 0.8) if filters else None,
        seeds=torch.tensor(seeds),
    )


def test_steps_advance_through_the_block_table() -> None:
    recorder = Recorder()
    start = start_at([2, 9], [[5, 3], [7, 1, 6]])
    drafts = DraftChain(recorder, STEPS + 1, BLOCK_SIZE, MAX_MODEL_LEN).run(start, STEPS)
    assert (drafts.token_ids - start.token_ids[:, None]).tolist() == [[1, 2, 3]] * 2
    for i, (positions, metadata) in enumerate(recorder.seen):
        assert positions.tolist() == [2 + i, 9 + i]
        assert metadata.context_lens.tolist() == [3 + i, 10 + i]
        assert metadata.cu_seqlens_q.tolist() == [0, 1, 2]
        assert metadata.query_lens_cpu == (1, 1)
        assert metadata.context_lens_cpu is None
        assert metadata.max_context_len == 12
    slots = [metadata.slot_mapping.tolist() for _, metadata in recorder.seen]
    assert slots == [[22, 25], [23, 26], [12, 27]]


def test_past_its_blocks_or_the_context_a_step_writes_nothing() -> None:
    """Another sequence's longer table does not lend its blocks, nor does a padded entry."""
    recorder = Recorder()
    tables = [[5], list(range(8)), []]
    DraftChain(recorder, STEPS + 1, BLOCK_SIZE, MAX_MODEL_LEN).run(
        start_at([3, 28, 0], tables), STEPS
    )
    slots = [metadata.slot_mapping.tolist() for _, metadata in recorder.seen]
    assert slots == [[23, 28, -1], [-1, 29, -1], [-1, -1, -1]]
    for positions, metadata in recorder.seen:
        assert int(positions.max()) < MAX_MODEL_LEN
        assert metadata.context_lens.tolist() == (positions + 1).tolist()


class Drafts:
    """One draft whose chain runs eagerly and through graphs, on the same pool."""

    def __init__(self, bench: DraftBench) -> None:
        choice = DraftChoice(bench.draft.target_ids, 0.8, confident=True)
        proposer = EagleProposer(
            bench.draft, bench.builder, STEPS + 1, BLOCK_SIZE, MAX_MODEL_LEN, choice=choice
        )
        self.chain = DraftChain(proposer._predict, STEPS + 1, BLOCK_SIZE, MAX_MODEL_LEN)
        (self.pool,) = bench.pools.values()
        self.pool.normal_(generator=torch.Generator().manual_seed(0))
        before = self.pool.clone()
        plan = GraphPlan(ReexecuteBackend(), (1, 2, 4), (12, 24), BLOCK_SIZE, CPU)
        self.chain.capture(plan, bench.draft.norm.weight, confident=True)
        assert torch.equal(self.pool, before)

    @torch.inference_mode()
    def check(self, start: ChainStart) -> None:
        """Both propose the same and leave the same."""
        before = self.pool.clone()
        expected, after = self.chain.run_eagerly(start, STEPS), self.pool.clone()
        self.pool.copy_(before)
        drafts = self.chain.run(start, STEPS)
        assert drafts.token_ids.equal(expected.token_ids)
        assert drafts.confidences is not None
        torch.testing.assert_close(drafts.confidences, expected.confidences)
        torch.testing.assert_close(self.pool, after, atol=1e-5, rtol=1e-5)
        untouched = after == before
        assert torch.equal(self.pool[untouched], before[untouched])


@pytest.fixture(scope="module", params=["mha", "mla"])
def drafts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, llama_target
) -> Drafts:
    raw = MHA if request.param == "mha" else MLA
    folder: Path = tmp_path_factory.mktemp("draft")
    draft = load(write_draft(folder, raw, draft_tensors(raw)), *llama_target)
    return Drafts(DraftBench(draft, BLOCK_SIZE, num_blocks=40))


# (position of the newest token, blocks beyond those that hold it; negative: too few).
SEQUENCE = st.tuples(st.integers(0, MAX_MODEL_LEN - 1), st.integers(-1, 1))


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.lists(SEQUENCE, min_size=1, max_size=5), min_size=1, max_size=4))
def test_a_graph_does_the_same(drafts: Drafts, batches: list[list[tuple[int, int]]]) -> None:
    """In any order of batches: a smaller one finds a larger one's leftovers in the buffers."""
    for batch in batches:
        free = iter(range(1, 40))
        counts = [max(position // BLOCK_SIZE + 1 + spare, 1) for position, spare in batch]
        tables = [[next(free) for _ in range(min(count, 7))] for count in counts]
        positions = [position for position, _ in batch]
        races = None, race_of(positions, filters=False), race_of(positions, filters=True)
        drafts.check(start_at(positions, tables, races[sum(positions) % 3]))


def test_leftovers_of_a_larger_batch_write_nothing(drafts: Drafts) -> None:
    drafts.check(start_at([5, 6, 7, 8], [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]))
    drafts.check(start_at([9], [[13, 14, 15]]))
    drafts.check(start_at([5, 6, 7], [[1, 2, 3], [4, 5, 6], [7, 8, 9]]))


@torch.inference_mode()
def test_each_draft_races_at_its_own_position(drafts: Drafts) -> None:
    """The noise is that of the request's seed and the draft's place in the text."""
    tables = [[1, 2, 3], [4, 5, 6]]
    start = start_at([5, 5], tables, race_of([3, 3], filters=False))
    token_ids = start.token_ids[:1].expand(2).clone()
    start = replace(start, token_ids=token_ids, hidden=start.hidden[:1].expand(2, HIDDEN).clone())
    greedy, hot = drafts.chain.run_eagerly(start, STEPS).token_ids.tolist()
    assert greedy != hot
    later = replace(start, positions=start.positions + 1)
    seeded = replace(start, race=replace(start.race, seeds=torch.tensor([4, 4])))
    for other in (later, seeded):
        first, second = drafts.chain.run_eagerly(other, STEPS).token_ids.tolist()
        assert second != hot
    assert first == greedy
