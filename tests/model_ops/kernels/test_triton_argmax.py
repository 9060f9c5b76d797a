"""The largest score of each row, of one rank or of several: Triton finds what torch does."""

from __future__ import annotations

import math

import pytest
import torch
from same_numbers import check, random

from atom.model_ops.kernels.torch import sampling as torch_ops
from atom.model_ops.kernels.triton.sampling import argmax as triton_ops
from atom.model_ops.registry import OpQuery
from atom.platform import Platform

VOCABULARIES = pytest.mark.parametrize("vocab", [1, 7, 100, 8192, 8193, 20000])


def scores_of(vocab: int) -> torch.Tensor:
    """With ties, zeros of both signs, infinities and NaN."""
    scores = (torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).round()
    scores[1] = -math.inf
    scores[2] = -0.0
    scores[2, vocab // 2] = 0.0
    scores[3, vocab - 1], scores[4, vocab // 3], scores[4, vocab - 1] = math.inf, *[math.nan] * 2
    return scores


@VOCABULARIES
def test_the_largest_of_each_row(vocab: int, device: torch.device) -> None:
    """NaN first, then the first of equal scores."""
    scores, ids = scores_of(vocab), random(vocab)(0, 2**31, vocab)
    ops = triton_ops.argmax, torch_ops.argmax
    for rows in (scores, scores[3:4], scores[:0]):
        check(*ops, device, rows)
        check(*ops, device, rows, ids)
    wider = torch.cat((scores, scores), dim=1).to(device)[:, :vocab]
    assert triton_ops.argmax(wider).equal(ops[1](wider))


@VOCABULARIES
def test_the_largest_of_a_rank(vocab: int, device: torch.device) -> None:
    """NaN may have other bits."""
    for rows in (scores_of(vocab), scores_of(vocab)[:0]):
        got, wanted = (op.largest_pair(rows.to(device), 70) for op in (triton_ops, torch_ops))
        assert got.dtype == wanted.dtype == torch.int32
        assert got[:, 1].equal(wanted[:, 1])
        pairs = (t[:, 0].view(torch.float32) for t in (got, wanted))
        torch.testing.assert_close(*pairs, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match=r"float32, not torch\.float16"):
        triton_ops.largest_pair(scores_of(vocab).half().to(device), 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("needs_finite", [False, True])
def test_the_largest_of_all_ranks(ranks: int, needs_finite: bool, device: torch.device) -> None:
    scores = (torch.randn(ranks, 40, generator=torch.Generator().manual_seed(ranks))).round()
    scores[:, 1], scores[ranks // 2, 2], scores[-1, 3:5] = -math.inf, math.nan, math.inf
    places = random(ranks)(0, 999, ranks, 40).int()
    pairs = torch.stack((scores.view(torch.int32), places), dim=-1)
    ids = random(0)(0, 2**31, 999)
    for token_ids in (None, ids):
        for rows in (pairs, pairs[:, :0]):
            ops = triton_ops.largest_of_pairs, torch_ops.largest_of_pairs
            check(*ops, device, rows, token_ids, needs_finite)
    found = triton_ops.largest_of_pairs(pairs.to(device), None, needs_finite)
    assert (found[1:5] == -1).all() == needs_finite


def test_more_scores_than_a_program_reads_are_refused() -> None:
    sm90 = Platform("cuda", "sm90", True)
    for size, is_refused in ((2**16, False), (2**16 + 1, True)):
        reason = triton_ops.refuses(OpQuery(sm90, torch.float32, {"vocab_size": size}))
        assert (reason is not None) == is_refused
