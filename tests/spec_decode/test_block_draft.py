"""Block drafters against the dense reference, however their context came about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_ops.batches import Part
from spec_decode import block_bench
from spec_decode.block_bench import DRAFTS, LAYER, VOCAB, BlockBench, step_of
from spec_decode.block_reference import BlockReference

from atom.model_loader.source import ModelSource
from atom.models.base import CausalLM
from atom.models.block_draft.draft import BlockDraft
from atom.stats import ExpectedAcceptance

Target = tuple[CausalLM, ModelSource]
CONTEXT = 21
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


class Case:
    """A draft on disk, loaded, and its reference; random states and tokens of a context."""

    def __init__(self, name: str, folder: Path, target: Target) -> None:
        self.draft = DRAFTS[name]
        block_bench.write_draft(folder, self.draft, "model." if name == "dspark" else "")
        self.model = block_bench.load(folder, *target, self.draft.kind)
        tensors = block_bench.draft_tensors(self.draft)
        embed, head = target[0].token_embedding.weight, target[0].output_head.weight
        self.reference = BlockReference(
            self.draft.flat,
            self.draft.meaning,
            tensors,
            embed,
            head,
            self.draft.raw["block_size"],
            self.draft.mask_token,
        )
        generator = torch.Generator().manual_seed(3)
        shape = self.draft.num_aux, CONTEXT, LAYER["hidden_size"]
        self.aux = list(torch.randn(shape, generator=generator) * 3)
        self.tokens = torch.randint(0, VOCAB, (CONTEXT,), generator=generator).tolist()
        self.num_drafts = self.model.config.max_drafts

    def rows(self, begin: int, end: int) -> list[torch.Tensor]:
        return [a[begin:end] for a in self.aux]

    def check(
        self, drafts: list[int], scores: torch.Tensor, context: int, anchor: int | None = None
    ) -> None:
        """Against the reference after `context` tokens."""
        anchor = self.tokens[context - 1] if anchor is None else anchor
        expected, tokens = self.reference.scores(self.rows(0, context), anchor)
        torch.testing.assert_close(scores.double(), expected[: len(drafts)], **CLOSE)
        assert drafts == tokens[: len(drafts)]


@pytest.fixture(params=DRAFTS)
def case(request: pytest.FixtureRequest, tmp_path: Path, llama_target: Target) -> Case:
    return Case(request.param, tmp_path, llama_target)


@pytest.mark.parametrize(
    ("name", "method"), [("dspark", "dspark"), ("dspark without markov", "dflash")]
)
def test_a_card_is_named_after_the_method(
    name: str, method: str, tmp_path: Path, llama_target: Target
) -> None:
    card = {"tokens_per_forward": 2.5, "num_speculative_tokens": 3, "data": "GSM8K"}
    draft = DRAFTS[name]
    stated = replace(draft, raw={**draft.raw, "expected_acceptance_length": card})
    model = block_bench.load(block_bench.write_draft(tmp_path, stated), *llama_target, method)
    lookahead = BlockBench(model).proposer.lookahead
    assert lookahead.expected_acceptance == ExpectedAcceptance(source=method, **card)
    # Its context is what the target computed, so any token may follow a cached block.
    assert not lookahead.kv_depends_on_successor


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark rnn", "speculators dspark"])
def test_a_draft_is_quantised_as_asked(name: str, tmp_path: Path, llama_target: Target) -> None:
    """And drafts nearly what it did."""
    case = Case(name, tmp_path, llama_target)
    rounded = block_bench.load(tmp_path, *llama_target, case.draft.kind, "int8")
    formats = [layer.storage.format for layer in (case.model.fc, rounded.fc)]
    assert formats[0] is None
    assert formats[1] is not None
    assert formats[1].codes == "int8"
    found = []
    for model in (case.model, rounded):
        bench = BlockBench(model)
        part = Part(CONTEXT, 0, bench.blocks(CONTEXT + model.config.block_size))
        step = [part], case.rows(0, CONTEXT), case.tokens, [CONTEXT - 1], 1
        _, scores, _ = bench.step(*step)
        found.append(scores.softmax(-1))
    assert 1e-5 < (found[0] - found[1]).abs().max() < 0.2


def bench_of(model: BlockDraft) -> BlockBench:
    return BlockBench(model)


def test_scores_equal_the_reference(case: Case) -> None:
    """A whole prompt; then chunks, beside another sequence; then a prefix that another wrote; then
    everything again in other blocks, as after preemption."""
    bench, n = bench_of(case.model), case.num_drafts
    room = CONTEXT + case.model.config.block_size
    own = bench.blocks(room)
    (drafts,), (scores,), _ = bench.step(
        [Part(CONTEXT, 0, own)], case.rows(0, CONTEXT), case.tokens, [CONTEXT - 1], n
    )
    case.check(drafts, scores, CONTEXT)

    chunked, other = bench.blocks(room), bench.blocks(room)
    bench.step([Part(9, 0, chunked)], case.rows(0, 9), case.tokens[:9], [], n)
    rows = [torch.cat([a[9:14], a[:7]]) for a in case.aux]
    parts = [Part(5, 9, chunked), Part(7, 0, other)]
    tokens = [*case.tokens[9:14], *case.tokens[:7]]
    both, scores, _ = bench.step(parts, rows, tokens, [4, 11], n)
    case.check(both[0], scores[0], 14)
    case.check(both[1], scores[1], 7)

    # Two full blocks of the first sequence, shared.
    shared = [*own[:2], *bench.blocks(room - 8)]
    (drafts,), (scores,), _ = bench.step(
        [Part(5, 8, shared)], case.rows(8, 13), case.tokens[8:13], [4], n
    )
    case.check(drafts, scores, 13)

    again = bench.blocks(room)
    (drafts,), (scores,), _ = bench.step(
        [Part(14, 0, again)], case.rows(0, 14), case.tokens[:14], [13], n
    )
    case.check(drafts, scores, 14)


def test_steps_after_rejected_drafts_equal_the_reference(case: Case) -> None:
    """A block, then its verification of which two rows count, a step without drafts, a block."""
    bench, n = bench_of(case.model), case.num_drafts
    own = bench.blocks(CONTEXT + case.model.config.block_size)
    bench.step([Part(8, 0, own)], case.rows(0, 8), case.tokens[:8], [7], n)
    # Rows 8 to 8 + n are the anchor and the drafts; the last ones hold states of rejected tokens.
    wrong = [torch.cat([a[8:10], torch.full((n - 1, a.shape[1]), 7.0)]) for a in case.aux]
    tokens = [*case.tokens[8:10], *[0] * (n - 1)]
    (drafts,), (scores,), _ = bench.step([Part(n + 1, 8, own)], wrong, tokens, [1], n)
    case.check(drafts, scores, 10)
    none, *_ = bench.step([Part(1, 10, own)], case.rows(10, 11), case.tokens[10:11], [0], 0)
    assert none == [[]]
    (drafts,), (scores,), _ = bench.step(
        [Part(1, 11, own)], case.rows(11, 12), case.tokens[11:12], [0], 2
    )
    case.check(drafts, scores, 12)
    assert len(drafts) == 2


def test_a_block_ends_where_a_sequence_has_no_slots(tmp_path: Path, llama_target: Target) -> None:
    """Rows beyond are seen by none: those before see a shorter block."""
    case = Case("dflash", tmp_path, llama_target)
    bench = bench_of(case.model)
    (drafts,), (scores,), _ = bench.step(
        [Part(10, 0, bench.blocks(10))], case.rows(0, 10), case.tokens[:10], [9], 4
    )
    case.reference.block_size = 2  # 12 slots: positions 10 and 11 are the anchor and one mask
    expected, (first,) = case.reference.scores(case.rows(0, 10), case.tokens[9])
    torch.testing.assert_close(scores[:1].double(), expected, **CLOSE)
    assert drafts[0] == first


class ParityGuide:
    """Allows, after each token, those of the other parity; and at first the odd ones."""

    def __init__(self) -> None:
        self.previous = torch.zeros(1, dtype=torch.int64)
        self.refused: list[torch.Tensor] = []

    def restrict(self, logits: torch.Tensor, target_ids: torch.Tensor | None) -> None:
        tokens = torch.arange(logits.shape[1]) if target_ids is None else target_ids
        self.refused.append((tokens - self.previous[:, None]) % 2 == 0)
        logits.masked_fill_(self.refused[-1], -torch.inf)

    def take(self, token_ids: torch.Tensor) -> None:
        self.previous = token_ids.clone()


@pytest.mark.parametrize("name", [*DRAFTS])
def test_drafts_follow_a_guide(name: str, tmp_path: Path, llama_target: Target) -> None:
    """Each is the best of those that may follow the ones before, also where heads rank the best
    tokens alone."""
    case = Case(name, tmp_path, llama_target)
    bench, n = BlockBench(case.model), case.num_drafts
    guide = ParityGuide()
    step = step_of(
        [Part(CONTEXT, 0, bench.blocks(CONTEXT + case.model.config.block_size))],
        case.rows(0, CONTEXT),
        case.tokens,
        [CONTEXT - 1],
        bench.block_size,
    )
    for race in (step.draft_sampling, None):
        bench.choice.logits, guide.refused = [], []
        guide.previous = torch.zeros(1, dtype=torch.int64)
        with torch.inference_mode():
            proposal = bench.proposer.propose(replace(step, guide=guide, draft_sampling=race), n)
        (drafts,) = proposal.token_ids.tolist()
        assert [t % 2 for t in drafts] == [(i + 1) % 2 for i in range(n)]
        for token, scores, refused in zip(drafts, bench.choice.logits, guide.refused, strict=True):
            assert torch.equal(scores.isneginf() | refused, scores.isneginf())
            best = scores.argmax(-1)
            assert token == int(
                best if case.model.target_ids is None else case.model.target_ids[best]
            )
        if case.draft.meaning.top_k:
            ranked = [int(scores.isfinite().sum()) for scores in bench.choice.logits]
            assert ranked == [case.draft.meaning.top_k] * n


def test_confidences_equal_the_reference(tmp_path: Path, llama_target: Target) -> None:
    case = Case("dspark", tmp_path, llama_target)
    bench = BlockBench(case.model, confident=True)
    own = bench.blocks(CONTEXT + 5)
    rows = case.rows(0, CONTEXT)
    (drafts,), _, confidences = bench.step(
        [Part(CONTEXT, 0, own)], rows, case.tokens, [CONTEXT - 1], case.num_drafts
    )
    expected = case.reference.confidence(rows, case.tokens[-1], drafts)
    assert confidences is not None
    torch.testing.assert_close(confidences[0].double(), expected, **CLOSE)
