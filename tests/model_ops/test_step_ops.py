"""The small ops around a step's sampling and drafting: native ones do what torch's do."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from atom.model_ops.kernels.native import gather as native_gather
from atom.model_ops.kernels.native import sampling as native_sampling
from atom.model_ops.kernels.native import speculation as native_speculation
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.torch import gather, sampling, speculation

REASON = native_build().reason
NATIVE = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
SPECULATION = pytest.mark.parametrize(
    "ops", [speculation, pytest.param(native_speculation, marks=NATIVE)], ids=["torch", "native"]
)
# Sequences with 2, 0 and 3 drafts of which 2, 0 and 1 are accepted.
TABLE = torch.tensor([[0, 1, 2, 2], [3, 3, 3, 3], [4, 5, 6, 7]])
SAMPLED = torch.tensor([7, 8, -1, 5, 4, 3, 2, 1])
DRAFTS = torch.tensor([[7, 8, -2], [-2, -2, -2], [4, 9, 2]])
ACCEPTED = torch.tensor([2, 0, 1])


@SPECULATION
def test_drafts_are_accepted_up_to_the_first_that_differs(ops: ModuleType) -> None:
    token_ids, accepted = ops.verify_drafts(SAMPLED, DRAFTS, TABLE)
    assert accepted.tolist() == ACCEPTED.tolist()
    kept = [row[: n + 1] for row, n in zip(token_ids.tolist(), accepted.tolist(), strict=True)]
    assert kept == [[7, 8, -1], [5], [4, 3]]
    equal = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([[1, 2], [5, 5]])
    token_ids, accepted = ops.verify_drafts(*equal, None)
    assert token_ids.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert accepted.tolist() == [2, 0]
    token_ids, accepted = ops.verify_drafts(SAMPLED, None, None)
    assert torch.equal(token_ids, SAMPLED[:, None])
    assert accepted.tolist() == [0] * 8


@SPECULATION
def test_samples_follow_their_rows(ops: ModuleType) -> None:
    """Rows 2, 3 and 4 of the forward pass are a prompt's; where no token is chosen there is 0."""
    rows = torch.tensor([0, 1, 2, 6, 7, 8, 9, 10])
    after = torch.full((12,), 90)
    last = ops.place_samples(after, rows, SAMPLED, ACCEPTED, TABLE)
    assert after.tolist() == [7, 8, 0, 90, 90, 90, 5, 4, 3, 2, 1, 90]
    assert last.tolist() == [2, 6, 8]
    last = ops.place_samples(after, rows, SAMPLED, torch.tensor([3, 1]), None)
    assert last.tolist() == [6, 8]
    assert ops.place_samples(after, rows, SAMPLED, torch.zeros_like(rows), None).equal(rows)
    none = rows[:0]
    assert ops.place_samples(after, none, none, none, None).numel() == 0


@SPECULATION
def test_sequences_advance_within_their_blocks(ops: ModuleType) -> None:
    """Up to the last block, the longest context and, for padding, position 0."""
    positions = torch.tensor([2, 6, 7, 0])
    tables = torch.tensor([[5, 3, 9], [7, 1, 9], [2, 4, 6], [9, 9, 9]], dtype=torch.int32)
    counts = torch.tensor([2, 2, 3, 0], dtype=torch.int32)
    tokens = torch.tensor([50, 51, 52, 53])
    for distance, inside, slots in (
        (1, [3, 7, 8, 0], [23, 7, 24, -1]),
        (2, [4, 7, 9, 0], [12, -1, 25, -1]),
        (3, [5, 7, 9, 0], [13, -1, -1, -1]),
    ):
        given = tokens, positions, tables[:, :], counts, distance, 1, 99, 4, 10
        got = ops.place_drafts(*given)
        assert [t.tolist() for t in got] == [
            tokens.tolist(),
            inside,
            slots,
            [p + 1 for p in inside],
            [0, 1, 2, 3, 4],
        ]


@NATIVE
@pytest.mark.parametrize("vocab", [1, 7, 100, 8192, 8193, 20000])
def test_the_largest_of_each_row(vocab: int) -> None:
    """NaN first, then the lowest id of equal scores, in any batch and by any number of threads."""
    generator = torch.Generator().manual_seed(vocab)
    scores = (torch.randn(40, vocab, generator=generator) * 3).round()
    scores[1] = -math.inf
    scores[2] = -0.0
    scores[2, vocab // 2] = 0.0
    scores[3, vocab - 1], scores[4, vocab // 3], scores[4, vocab - 1] = math.inf, *[math.nan] * 2
    expected = sampling.argmax(scores)
    assert expected[1:5].tolist() == [0, 0, vocab - 1, vocab // 3]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in (slice(0, 40), slice(3, 7), slice(4, 5), slice(0, 0)):
                assert native_sampling.argmax(scores[rows]).equal(expected[rows])
    finally:
        torch.set_num_threads(before)


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_an_embedding(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 33, generator=generator).to(dtype)
    for count in (0, 1, 7, 3000):
        ids = torch.randint(0, 50, (count,), generator=generator)
        assert native_gather.embedding(ids, weight).equal(gather.embedding(ids, weight))
    assert native_gather.embedding(ids[::2], weight).equal(weight[ids[::2]])
    for bad in (-1, 50):
        with pytest.raises(IndexError, match=f"{bad} is none of 50 rows"):
            native_gather.embedding(torch.tensor([3, bad]), weight)


@NATIVE
def test_options_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    options, seeds = torch.randn(7, 9, generator=generator), torch.arange(9) * 2**40
    for rows in ([4, 0, 4, 8], []):
        index = torch.tensor(rows, dtype=torch.int64)
        for got, expected in zip(
            native_gather.sampling_options(options, seeds, index),
            gather.sampling_options(options, seeds, index),
            strict=True,
        ):
            assert got.equal(expected)
    for bad in (-1, 9):
        with pytest.raises(IndexError, match=f"row {bad} is outside 0..8"):
            native_gather.sampling_options(options, seeds, torch.tensor([bad]))


@SPECULATION
def test_blocks_lie_behind_their_sequences(ops: ModuleType) -> None:
    """Whole, cut at the last block, cut at the longest context, without a slot, and padding."""
    anchors, positions = torch.tensor([50, 51, 52, 53, 0]), torch.tensor([2, 5, 7, 7, 0])
    tables = torch.tensor([[5, 3, 9], [7, 1, 9], [2, 4, 6], [2, 4, 6], [9, 9, 9]]).int()
    counts = torch.tensor([2, 2, 3, 2, 0], dtype=torch.int32)
    got = ops.place_drafts(anchors, positions, tables, counts, 1, 3, 99, 4, 10)
    expected = [
        [a for anchor in anchors.tolist() for a in (anchor, 99, 99)],
        [3, 4, 5, 6, 7, 7, 8, 9, 9, 7, 7, 7, 0, 0, 0],
        [23, 12, 13, 6, 7, -1, 24, 25, -1, -1, -1, -1, -1, -1, -1],
        [6, 8, 10, 8, 3],
        [0, 3, 6, 9, 12, 15],
    ]
    assert [t.tolist() for t in got] == expected
    assert [t.dtype for t in got] == [torch.int64] * 3 + [torch.int32] * 2
    none = ops.place_drafts(anchors[:0], positions[:0], tables[:0], counts[:0], 1, 3, 99, 4, 10)
    assert [len(t) for t in none] == [0, 0, 0, 0, 1]


@NATIVE
def test_what_does_not_fit_is_refused() -> None:
    ops, rows = native_speculation, torch.arange(8)
    tables, counts = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(IndexError, match="3 blocks, its table 2"):
        ops.place_drafts(rows[:1], rows[:1], tables, counts, 1, 4, 99, 4, 99)
    with pytest.raises(ValueError, match="verify_drafts"):
        ops.verify_drafts(SAMPLED[:7], DRAFTS[:2], None)
    with pytest.raises(IndexError, match="sequence 2"):
        ops.verify_drafts(SAMPLED[:7], DRAFTS, TABLE)
    with pytest.raises(ValueError, match="place_samples"):
        ops.place_samples(rows, rows, SAMPLED.int(), ACCEPTED, TABLE)
    for accepted, size in ((torch.tensor([0, 0, 4]), 8), (ACCEPTED, 7)):
        with pytest.raises(IndexError, match="no such row"):
            ops.place_samples(rows[:size], rows, SAMPLED, accepted, TABLE)
    with pytest.raises(ValueError, match="argmax"):
        native_sampling.argmax(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="gather_rows"):
        native_gather.embedding(rows.int(), torch.zeros(9, 3))
