"""The single-token steps of a draft: where they write, and how drafts are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draft_bench import HIDDEN, MHA, MLA, VOCAB, DraftBench, draft_tensors, load, write_draft

from atom.kv_cache.paged import PagedCache
from atom.model_ops.attention.metadata import (
    AttentionMetadata,
    ModelInput,
    ModelOutput,
    SamplingMetadata,
)
from atom.model_ops.kernels.torch.speculation import place_drafts
from atom.spec_decode.proposers.base import DraftSampler, NullProposer, VerifiedStep
from atom.spec_decode.proposers.chain_proposer import ChainModel, ChainProposer
from atom.spec_decode.proposers.eagle3 import Eagle3Chain

BLOCK_SIZE, MAX_MODEL_LEN, STEPS = 4, 30, 3


class Recorder(ChainModel):
    """Predicts the token after the last, and keeps what it reads.

    Attributes:
        seen: of each single-token step, the index of its drafts, its rows, and their hidden states.
    """

    cache_prefix = "none_"

    def __init__(self, *, reads_target: bool = True, keeps_pace: bool = False) -> None:
        self.module = torch.nn.Module()
        self.vocab_size = VOCAB
        self.kv_depends_on_successor, self.keeps_pace = reads_target, keeps_pace
        self.seen: list[tuple[int, ModelInput, torch.Tensor]] = []

    def read_target(self, output: ModelOutput) -> torch.Tensor:
        return output.hidden_states

    def forward(
        self, index: int, rows: ModelInput, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(rows.input_ids) == len(rows.positions) == len(hidden)
        if index or not self.kv_depends_on_successor:
            self.seen.append((index, rows, hidden))
        return rows.input_ids[:, None], hidden

    def write_kv(self, rows: ModelInput, hidden: torch.Tensor) -> None: ...

    def compute_logits(self, states: torch.Tensor, index: int = 0) -> torch.Tensor:
        raise NotImplementedError

    def choose_tokens(self, states: torch.Tensor, index: int = 0) -> torch.Tensor:
        return states[:, 0] + 1

    @property
    def metadata(self) -> list[AttentionMetadata]:
        return [rows.attention for _, rows, _ in self.seen]


def proposer_of(model: ChainModel, num_drafts: int = STEPS + 1) -> ChainProposer:
    cache = PagedCache({}, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    choice = DraftSampler(model.target_ids, 0.8)
    limits = num_drafts, BLOCK_SIZE, MAX_MODEL_LEN
    return ChainProposer(model, cache, *limits, place_drafts, choice)


def step_at(
    positions: Sequence[int],
    tables: Sequence[Sequence[int]],
    draft_sampling: SamplingMetadata | None = None,
) -> VerifiedStep:
    """Of one row of each sequence; the newest tokens are at `positions`."""
    width, count = max(map(len, tables)), len(positions)
    rows = torch.arange(count)
    generator = torch.Generator().manual_seed(sum(positions))
    attention = AttentionMetadata(
        slot_mapping=torch.full((count,), -1),
        block_tables=torch.tensor(
            [[*t, *[0] * (width - len(t))] for t in tables], dtype=torch.int32
        ),
        block_counts=torch.tensor([len(t) for t in tables], dtype=torch.int32),
        context_lens=torch.tensor(positions, dtype=torch.int32),
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32),
        max_seqlen_q=1,
        max_context_len=max(positions),
        query_lens_cpu=(1,) * count,
        context_lens_cpu=None,
    )
    states = torch.randn(4, count, HIDDEN, generator=generator)
    return VerifiedStep(
        [],
        ModelInput(rows, torch.tensor(positions) - 1, attention),
        ModelOutput(states[0], tuple(states[1:])),
        torch.randint(0, VOCAB, (count,), generator=generator),
        rows,
        None,
        draft_sampling,
    )


def nobody(step: VerifiedStep) -> VerifiedStep:
    """All of its sequences are in their prompts."""
    none = torch.zeros(0, dtype=torch.int64)
    return replace(step, last_rows=none, sampled=none)


def test_steps_advance_through_the_block_table() -> None:
    model, step = Recorder(), step_at([2, 9], [[5, 3], [7, 1, 6]])
    drafts = proposer_of(model).propose(step, STEPS + 1).token_ids
    assert (drafts - step.next_token_ids[:, None]).tolist() == [[1, 2, 3, 4]] * 2
    assert [index for index, _, _ in model.seen] == [1, 2, 3]
    for i, (_, rows, hidden) in enumerate(model.seen):
        metadata = rows.attention
        assert rows.positions.tolist() == [2 + i, 9 + i]
        assert rows.input_ids.tolist() == drafts[:, i].tolist()
        assert hidden.equal(step.model_output.hidden_states)
        assert metadata.context_lens.tolist() == [3 + i, 10 + i]
        assert metadata.cu_seqlens_q.tolist() == [0, 1, 2]
        assert metadata.query_lens_cpu == (1, 1)
        assert metadata.context_lens_cpu is None
        assert metadata.max_context_len == 12
    slots = [metadata.slot_mapping.tolist() for metadata in model.metadata]
    assert slots == [[22, 25], [23, 26], [12, 27]]


def test_without_the_target_the_newest_token_has_a_step_of_its_own() -> None:
    model, step = Recorder(reads_target=False), step_at([2, 9], [[5, 3], [7, 1, 6]])
    drafts = proposer_of(model).propose(step, STEPS).token_ids
    assert (drafts - step.next_token_ids[:, None]).tolist() == [[1, 2, 3]] * 2
    assert [rows.positions.tolist() for _, rows, _ in model.seen] == [[2, 9], [3, 10], [4, 11]]
    assert model.seen[0][1].input_ids.equal(step.next_token_ids)


def test_sampled_sequences_alone_go_on() -> None:
    """The first one is still in its prompt."""
    model, step = Recorder(), step_at([2, 9], [[5, 3], [7, 1, 6]])
    one = torch.tensor([1])
    drafts = proposer_of(model).propose(replace(step, last_rows=one, sampled=one), STEPS + 1)
    assert drafts.token_ids.shape == (1, STEPS + 1)
    slots = [metadata.slot_mapping.tolist() for metadata in model.metadata]
    assert slots == [[25], [26], [27]]
    assert model.seen[0][2].equal(step.model_output.hidden_states[1:])


def test_past_its_blocks_or_the_context_a_step_writes_nothing() -> None:
    """Another sequence's longer table does not lend its blocks, nor does a padded entry."""
    model = Recorder()
    step = step_at([3, 28, 0], [[5], range(8), []])
    proposer_of(model).propose(step, STEPS + 1)
    slots = [metadata.slot_mapping.tolist() for metadata in model.metadata]
    assert slots == [[23, 28, -1], [-1, 29, -1], [-1, -1, -1]]
    for _, rows, _ in model.seen:
        assert int(rows.positions.max()) < MAX_MODEL_LEN
        assert rows.attention.context_lens.tolist() == (rows.positions + 1).tolist()


@pytest.mark.parametrize("reads_target", [True, False])
@pytest.mark.parametrize(("longest", "told"), [(9, 12), (28, MAX_MODEL_LEN)])
def test_the_longest_context_is_that_of_the_last_step(
    longest: int, told: int, reads_target: bool
) -> None:
    """Ops size their work by it: a step whose keys go beyond would not see its newest ones."""
    model = Recorder(reads_target=reads_target)
    proposer_of(model).propose(step_at([longest], [range(8)]), STEPS + reads_target)
    assert int(model.metadata[-1].context_lens.max()) == told
    assert [metadata.max_context_len for metadata in model.metadata] == [told] * STEPS


def test_nobody_proposes_no_draft_of_each_sequence() -> None:
    step = SimpleNamespace(next_token_ids=torch.zeros(5).long(), last_rows=torch.tensor([1, 4]))
    assert NullProposer().propose(step, 0).token_ids.shape == (2, 0)  # type: ignore[arg-type]


def test_without_sequences_a_row_is_computed_that_writes_nothing() -> None:
    """Other ranks wait for the experts of each step."""
    model, step = Recorder(keeps_pace=True), nobody(step_at([8], [[1, 2, 3]]))
    assert proposer_of(model).propose(step, STEPS).token_ids.shape == (0, STEPS)
    assert [metadata.slot_mapping.tolist() for metadata in model.metadata] == [[-1]] * 2
    assert [(len(rows.input_ids), *hidden.shape) for _, rows, hidden in model.seen] == [
        (1, 1, HIDDEN)
    ] * 2
    alone = Recorder()
    assert proposer_of(alone).propose(step, STEPS).token_ids.shape == (0, STEPS)
    assert alone.seen == []


@pytest.fixture(scope="module", params=["mha", "mla"])
def chain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, llama_target
) -> ChainProposer:
    raw = MHA if request.param == "mha" else MLA
    folder: Path = tmp_path_factory.mktemp("draft")
    draft = load(write_draft(folder, raw, draft_tensors(raw)), *llama_target)
    bench = DraftBench(draft, BLOCK_SIZE, num_blocks=40)
    (pool,) = bench.pools.values()
    pool.normal_(generator=torch.Generator().manual_seed(0))
    return proposer_of(Eagle3Chain(draft))


@torch.inference_mode()
def test_each_draft_races_at_its_own_position(chain: ChainProposer) -> None:
    """The noise is that of the request's seed and the draft's place in the text."""
    # The first row is greedy.
    race = SamplingMetadata(temperature=torch.tensor([0.0, 2.0]), seeds=torch.tensor([3, 3]))
    step = step_at([5, 5], [[1, 2, 3], [4, 5, 6]], race)
    output = step.model_output
    alike = tuple(states[:1].expand(2, HIDDEN).clone() for states in output.aux_hidden_states)
    step = replace(
        step,
        model_output=replace(output, aux_hidden_states=alike),
        next_token_ids=step.next_token_ids[:1].expand(2).clone(),
    )
    greedy, hot = chain.propose(step, STEPS).token_ids.tolist()
    assert greedy != hot
    given = step.model_input
    later = replace(step, model_input=replace(given, positions=given.positions + 1))
    seeded = replace(step, draft_sampling=replace(race, seeds=torch.tensor([4, 4])))
    for other in (later, seeded):
        first, second = chain.propose(other, STEPS).token_ids.tolist()
        assert second != hot
    assert first == greedy
