"""The single-token steps of a draft: where they write, and how drafts are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draft_bench import HIDDEN, MHA, MLA, VOCAB, DraftBench, draft_tensors, load, write_draft

from atom.model_ops.attention.metadata import AttentionMetadata, SamplingMetadata
from atom.spec_decode.proposers.base import Chosen, DraftSampler, Guide, NullProposer, together
from atom.spec_decode.proposers.chain_proposer import ChainProposer, ChainStart, DraftChain
from atom.spec_decode.proposers.eagle3 import Eagle3Chain

BLOCK_SIZE, MAX_MODEL_LEN, STEPS = 4, 30, 3


class Recorder:
    """A draft step that predicts the token after the last and keeps the metadata it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, AttentionMetadata]] = []
        self.rows: list[tuple[int, ...]] = []

    def __call__(
        self,
        place: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        draft_sampling: SamplingMetadata | None,
        guide: Guide | None,
    ) -> tuple[Chosen, torch.Tensor]:
        assert place == len(self.seen) + 1
        self.seen.append((positions, metadata))
        self.rows.append((len(token_ids), *hidden.shape))
        return Chosen(token_ids + 1), hidden


def start_at(
    positions: Sequence[int],
    tables: list[list[int]],
    draft_sampling: SamplingMetadata | None = None,
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
        draft_sampling=draft_sampling,
    )


def race_of(seeds: Sequence[int]) -> SamplingMetadata:
    """The first row is greedy."""
    return SamplingMetadata(temperature=torch.arange(len(seeds)) * 2.0, seeds=torch.tensor(seeds))


def test_steps_advance_through_the_block_table() -> None:
    recorder = Recorder()
    start = start_at([2, 9], [[5, 3], [7, 1, 6]])
    drafts = together(DraftChain(recorder, BLOCK_SIZE, MAX_MODEL_LEN).run(start, STEPS))
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
    DraftChain(recorder, BLOCK_SIZE, MAX_MODEL_LEN).run(start_at([3, 28, 0], tables), STEPS)
    slots = [metadata.slot_mapping.tolist() for _, metadata in recorder.seen]
    assert slots == [[23, 28, -1], [-1, 29, -1], [-1, -1, -1]]
    for positions, metadata in recorder.seen:
        assert int(positions.max()) < MAX_MODEL_LEN
        assert metadata.context_lens.tolist() == (positions + 1).tolist()


@pytest.mark.parametrize(("longest", "told"), [(9, 12), (28, MAX_MODEL_LEN)])
def test_the_longest_context_is_that_of_the_last_step(longest: int, told: int) -> None:
    """Ops size their work by it: a step whose keys go beyond would not see its newest ones."""
    recorder = Recorder()
    tables = torch.arange(8, dtype=torch.int32)[None]
    attention = SimpleNamespace(
        block_tables=tables, block_counts=torch.tensor([8]), max_context_len=longest
    )
    step = SimpleNamespace(
        model_input=SimpleNamespace(attention=attention),
        sampled=None,
        draft_sampling=None,
        guide=None,
    )
    chain = DraftChain(recorder, BLOCK_SIZE, MAX_MODEL_LEN)
    last = torch.tensor([longest - 1])
    chain.begin(step, last, torch.tensor([5]), torch.zeros(1, HIDDEN), STEPS, first=1)  # type: ignore[arg-type]
    contexts = [int(metadata.context_lens.max()) for _, metadata in recorder.seen]
    assert contexts[-1] == told
    assert [metadata.max_context_len for _, metadata in recorder.seen] == [told] * STEPS


def test_nobody_proposes_no_draft_of_each_sequence() -> None:
    step = SimpleNamespace(next_token_ids=torch.zeros(5).long(), last_rows=torch.tensor([1, 4]))
    assert NullProposer().propose(step, 0).token_ids.shape == (2, 0)  # type: ignore[arg-type]


def test_without_sequences_a_row_is_computed_that_writes_nothing() -> None:
    """Other ranks wait for the experts of each step."""
    recorder = Recorder()
    attention = SimpleNamespace(
        block_tables=torch.zeros(0, 3, dtype=torch.int32),
        block_counts=torch.zeros(0, dtype=torch.int32),
        max_context_len=9,
    )
    step = SimpleNamespace(
        model_input=SimpleNamespace(attention=attention),
        sampled=None,
        draft_sampling=None,
        guide=None,
    )
    none = torch.zeros(0, dtype=torch.int64)
    chain = DraftChain(recorder, BLOCK_SIZE, MAX_MODEL_LEN)
    made = chain.extend(step, none, Chosen(none), torch.zeros(0, HIDDEN), STEPS)  # type: ignore[arg-type]
    assert made.token_ids.shape == (0, STEPS)
    assert [metadata.slot_mapping.tolist() for _, metadata in recorder.seen] == [[-1]] * 2
    assert recorder.rows == [(1, 1, HIDDEN)] * 2


@pytest.fixture(scope="module", params=["mha", "mla"])
def chain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, llama_target
) -> DraftChain:
    raw = MHA if request.param == "mha" else MLA
    folder: Path = tmp_path_factory.mktemp("draft")
    draft = load(write_draft(folder, raw, draft_tensors(raw)), *llama_target)
    bench = DraftBench(draft, BLOCK_SIZE, num_blocks=40)
    (pool,) = bench.pools.values()
    pool.normal_(generator=torch.Generator().manual_seed(0))
    choice = DraftSampler(draft.target_ids, 0.8)
    proposer = ChainProposer(
        Eagle3Chain(draft), bench.builder, STEPS + 1, BLOCK_SIZE, MAX_MODEL_LEN, choice=choice
    )
    return DraftChain(proposer._predict, BLOCK_SIZE, MAX_MODEL_LEN)


@torch.inference_mode()
def test_each_draft_races_at_its_own_position(chain: DraftChain) -> None:
    """The noise is that of the request's seed and the draft's place in the text."""
    tables = [[1, 2, 3], [4, 5, 6]]
    start = start_at([5, 5], tables, race_of([3, 3]))
    token_ids = start.token_ids[:1].expand(2).clone()
    start = replace(start, token_ids=token_ids, hidden=start.hidden[:1].expand(2, HIDDEN).clone())
    greedy, hot = together(chain.run(start, STEPS)).token_ids.tolist()
    assert greedy != hot
    later = replace(start, positions=start.positions + 1)
    seeded = replace(
        start, draft_sampling=replace(start.draft_sampling, seeds=torch.tensor([4, 4]))
    )
    for other in (later, seeded):
        first, second = together(chain.run(other, STEPS)).token_ids.tolist()
        assert second != hot
    assert first == greedy
