"""Sums over ranks, and the layers that communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks

from atom.distributed.collectives import TorchCollectives
from atom.distributed.ordered import in_order
from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.embedding import ParallelLMHead, TiedLMHead, VocabParallelEmbedding
from atom.model_ops.kernels.torch.sampling import choose_tokens
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import ResidualRMSNorm
from atom.platform import cpu_platform

HIDDEN = 16


def context(group: ParallelGroup, dtype: torch.dtype = torch.float32) -> LayerContext:
    return LayerContext.create(dtype, 8, cpu_platform(), group)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_norm_completes_the_sum_of_the_layer_before(dtype: torch.dtype) -> None:
    """The bits are those of the sum, then the norm."""
    residual, weight = random(5, HIDDEN).to(dtype), random(HIDDEN, seed=1).to(dtype)

    def add(group: ParallelGroup) -> tuple[torch.Tensor, ...]:
        norm = ResidualRMSNorm(HIDDEN, 1e-5, context(group, dtype))
        norm.weight.data.copy_(weight)
        partial = random(5, HIDDEN, seed=10 + group.rank).to(dtype)
        total = group.all_reduce(partial.clone())
        with torch.inference_mode():
            return (*norm.add(partial, residual), total)

    alone = ResidualRMSNorm(HIDDEN, 1e-5, context(SINGLE, dtype))
    alone.weight.data.copy_(weight)
    for normed, summed, total in run_ranks(3, add):
        expected = alone.add(total, residual)
        assert torch.equal(normed, expected[0])
        assert torch.equal(summed, expected[1])


def test_nccl_is_asked_for_the_current_stream() -> None:
    """Then it returns nothing to wait for."""

    class Group:
        def __getattr__(self, name: str) -> Callable[..., None]:
            def call(*given: Any) -> None:
                asked[name] = given[-1].asyncOp

            return call

    asked: dict[str, bool] = {}
    rows = torch.zeros(2)
    collectives = TorchCollectives(Group())
    collectives.all_reduce(rows)
    collectives.all_gather_into(rows, rows)
    collectives.all_to_all(rows, rows, [2], [2])
    collectives.broadcast(rows)
    assert len(asked) == 4
    assert not any(asked.values())


def test_the_table_of_ops_has_the_collectives() -> None:
    created = context(ParallelGroup(0, 2))
    ResidualRMSNorm(HIDDEN, 1e-5, created)
    VocabParallelEmbedding(8, HIDDEN, created, "embed_tokens")
    table = created.ops.describe()
    assert "all_reduce_add_rms_norm  torch" in table
    assert "\nall_reduce " in table
    alone = context(SINGLE)
    ResidualRMSNorm(HIDDEN, 1e-5, alone)
    assert "all_reduce" not in alone.ops.describe()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_in_the_order_of_the_ranks(dtype: torch.dtype) -> None:
    """Another order, or rounding between, would make others of them."""
    parts = torch.stack([random(3, 67, seed=r) * 10.0**r for r in range(4)]).to(dtype)
    a, b, c, d = parts.float()
    expected = ((a + b) + c) + d
    rounded = ((parts[3] + parts[2]) + parts[1]) + parts[0]
    assert not torch.equal(expected.to(dtype), rounded)

    def reduce(group: ParallelGroup) -> torch.Tensor:
        return in_order(group).all_reduce(parts[group.rank].clone())

    for total in run_ranks(4, reduce):
        assert torch.equal(total, expected.to(dtype))


# Of 3 ranks the last has 3 of 11 tokens, and of 4 it has 2.
VOCAB = 11
# Rows of logits: equal ones on several ranks, zeros of both signs, and what is no number.
TIES = torch.tensor(
    [
        [0.0] * VOCAB,
        [1.0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 2],
        [-1.0] * 9 + [5, 5],
        [-0.0, 0.0, -0.0] + [-1.0] * 8,
        [-1.0] * 4 + [0.0, -1, -0.0] + [-1.0] * 4,
        [0.0] * 8 + [float("nan"), 0, float("nan")],
        [float("inf")] + [0.0] * 9 + [float("inf")],
        [float("-inf")] * VOCAB,
    ]
)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("is_tied", [False, True])
@torch.inference_mode()
def test_argmax_over_a_split_vocabulary(size: int, is_tied: bool) -> None:
    """That of the whole logits: of equal ones the first, and a NaN before all others."""
    weight, hidden = random(VOCAB, HIDDEN), random(40, HIDDEN, seed=1)
    # Tokens that are alike on all ranks.
    weight[7], weight[10] = weight[2], weight[2]

    def outcome(group: ParallelGroup) -> tuple[torch.Tensor, ...]:
        created = context(group)
        embedding = VocabParallelEmbedding(VOCAB, HIDDEN, created, "embed_tokens")
        embedding.load_weight("weight", weight, None)
        head: ParallelLMHead | TiedLMHead
        if is_tied:
            head = TiedLMHead(embedding, created)
        else:
            head = ParallelLMHead(VOCAB, HIDDEN, created, "lm_head")
            head.load_weight("weight", weight, None)
        with torch.inference_mode():
            none = hidden[:0]
            assert head(none).shape == (0, VOCAB)
            assert head.argmax(none).shape == head.choose_greedily(none).shape == (0,)
            assert torch.equal(head.choose_greedily(hidden), head.argmax(hidden))
            embedded = embedding(torch.arange(VOCAB))
            return head(hidden), head.argmax(hidden), embedded

    for logits, token, embedded in run_ranks(size, outcome) if size > 1 else [outcome(SINGLE)]:
        assert logits.shape == (40, VOCAB)
        torch.testing.assert_close(logits, hidden @ weight.T)
        assert torch.equal(token, logits.argmax(dim=-1))
        assert token.dtype == torch.int64
        assert torch.equal(embedded, weight)


@pytest.mark.parametrize("size", [2, 3, 4])
@torch.inference_mode()
def test_argmax_of_ties_and_of_what_is_no_number(size: int) -> None:
    def chosen(group: ParallelGroup) -> tuple[torch.Tensor, torch.Tensor]:
        head = ParallelLMHead(VOCAB, len(TIES), context(group), "lm_head")
        own = head._logits._own
        head._logits._product = lambda hidden: hidden[:, own.start : own.start + own.size]
        with torch.inference_mode():
            return head.argmax(TIES), head.choose_greedily(TIES)

    for token, chosen_token in run_ranks(size, chosen):
        assert torch.equal(token, TIES.argmax(dim=-1))
        assert torch.equal(chosen_token, choose_tokens(TIES, SamplingMetadata()))
    assert choose_tokens(TIES, SamplingMetadata()).tolist() == [0, 3, 9, 0, 4, -1, -1, -1]
