"""The small ops around a step's sampling and drafting: Triton's do what torch's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from same_numbers import check, random

from atom.model_ops.kernels.torch import speculation as torch_ops
from atom.model_ops.kernels.triton.sampling import speculation as triton_ops

# More sequences than one program has, and fewer.
COUNTS = pytest.mark.parametrize("count", [1, 5, 33, 200])


def ragged(count: int, most: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Samples, drafts, table and accepted numbers of sequences with 0 to `most` drafts; few kinds
    of tokens, so that some drafts are right.
    """
    integers = random(seed)
    lens = integers(0, most + 1, count)
    lens[0] = most
    ends = (lens + 1).cumsum(0)
    column = torch.arange(most + 1)
    table = (ends - lens - 1)[:, None] + column.minimum(lens[:, None])
    sampled = integers(-1, 3, int(ends[-1]))
    drafts = integers(0, 3, count, most).masked_fill(column[:-1] >= lens[:, None], -2)
    return sampled, drafts, table, (integers(0, most + 1, count)).minimum(lens)


@COUNTS
@pytest.mark.parametrize("most", [1, 3, 16, 37])
def test_ragged_drafts(count: int, most: int, device: torch.device) -> None:
    ops = triton_ops.verify_drafts, torch_ops.verify_drafts
    sampled, drafts, table, limits = ragged(count, most, count + most)
    check(*ops, device, sampled, drafts, table)
    check(*ops, device, sampled, drafts, table, limits)
    assert most > 3 or count < 33 or torch_ops.verify_drafts(sampled, drafts, table)[1].any()


@COUNTS
def test_even_drafts_of_wider_rows(count: int, device: torch.device) -> None:
    """Drafts lie behind newest tokens; all may be right."""
    rows = random(count)(0, 2, count, 4).to(device)
    for sampled in (random(1)(0, 2, count * 4).to(device), rows.roll(-1, 1).flatten()):
        for limits in (None, random(2)(0, 4, count).to(device)):
            given = sampled, rows[:, 1:], None, limits
            for got, wanted in zip(
                triton_ops.verify_drafts(*given), torch_ops.verify_drafts(*given), strict=True
            ):
                assert torch.equal(got, wanted)
    assert limits is not None
    assert wanted.equal(limits.clamp(max=3))


@COUNTS
@pytest.mark.parametrize("most", [0, 3])
def test_samples_follow_their_rows(count: int, most: int, device: torch.device) -> None:
    ops = triton_ops.place_samples, torch_ops.place_samples
    sampled, _, table, accepted = ragged(count, most, count) if most else (
        *(random(3)(-1, 9, count), None, torch.arange(count)[:, None], torch.zeros(count).long()),
    )  # fmt: skip
    rows = torch.randperm(len(sampled) + 9, generator=torch.Generator().manual_seed(0))
    after = torch.full((len(rows),), 90)
    check(*ops, device, after, rows[: len(sampled)], sampled, accepted, table)
    even = random(4)(-1, 9, count * (most + 1))
    rows = torch.arange(len(even))
    check(*ops, device, torch.full_like(even, 90), rows, even, accepted, None)


def sequences(count: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Positions, tables in wider rows, and numbers of blocks of 4; some have none."""
    integers = random(seed)
    tables = integers(0, 2**31 - 1, count, 9).int()[:, 1:8]
    return integers(0, 30, count), tables, integers(0, 8, count).int()


def to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


@COUNTS
@pytest.mark.parametrize(
    ("distance", "num_rows"), [(0, 1), (1, 1), (3, 1), (1, 3), (1, 8), (2, 8), (1, 50)]
)
def test_drafts_lie_behind_their_sequences(
    count: int, distance: int, num_rows: int, device: torch.device
) -> None:
    """Slots are beyond 32 bits."""
    positions, tables, counts = sequences(count, count)
    sizes = distance, num_rows, 163839, 4, 25
    given = random(5)(0, 99, count), positions, tables, counts, *sizes
    check(triton_ops.place_drafts, torch_ops.place_drafts, device, *given)
    slots = triton_ops.place_drafts(*(to(t, device) for t in given))[2]
    assert count < 33 or (slots.max() > 2**32 and slots.min() == -1)


def test_no_sequences(device: torch.device) -> None:
    none, tables = torch.empty(0, dtype=torch.int64), torch.empty(0, 3, dtype=torch.int32)
    counts = none.int()
    for name, given in {
        "verify_drafts": (none, none.view(0, 2), None),
        "place_samples": (none, none, none, none, None),
        "place_drafts": (none, none, tables, counts, 1, 3, 99, 4, 10),
    }.items():
        check(getattr(triton_ops, name), getattr(torch_ops, name), device, *given)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    eight = torch.arange(8, device=device)
    with pytest.raises(ValueError, match=r"verify_drafts wants .* 2 sequences with 4 rows"):
        triton_ops.verify_drafts(eight[:7], eight[:6].view(2, 3), None)
    with pytest.raises(ValueError, match=r"place_samples wants .* a table \[3, 1\]"):
        triton_ops.place_samples(eight, eight, eight, eight[:2], eight[:3, None])
