"""What passes from step to step on the device: through Triton as through torch, and as told."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from atom.model_ops.kernels.torch import carried as torch_ops
from atom.model_ops.kernels.torch.carried import CarriedInputs, CarriedTokens
from atom.model_ops.kernels.triton.sampling import carried as triton_ops

OPS = pytest.mark.parametrize("ops", [torch_ops, triton_ops], ids=["torch", "triton"])
BLOCK_SIZE = 4


def carried(device: torch.device) -> CarriedTokens:
    """Rows 1 and 3 with two drafts each, at positions 6 and 11."""
    token_ids = torch.zeros(5, 4, dtype=torch.int64, device=device)
    token_ids[1, :3] = torch.tensor([70, 71, 72], device=device)
    token_ids[3, :3] = torch.tensor([90, 91, 92], device=device)
    return CarriedTokens(token_ids, torch.tensor([0, 6, 0, 11, 0], device=device))


def blank_inputs(device: torch.device, *, is_greedy: bool = False) -> CarriedInputs:
    """7 tokens of 3 sequences with 2, 0 and 1 drafts; the second is in its prompt."""
    blank = [torch.full((7,), -9, dtype=torch.int64, device=device) for _ in range(4)]
    return CarriedInputs(
        *blank[:3],
        context_lens=torch.full((3,), -9, dtype=torch.int32, device=device),
        next_token_ids=None if is_greedy else blank[3],
        sampled_positions=(
            None if is_greedy else torch.full((6,), -9, dtype=torch.int64, device=device)
        ),
        drafts=None if is_greedy else torch.full((3, 2), -2, dtype=torch.int64, device=device),
    )


# Row 3 with two drafts is the first sequence, row 1 with one draft the third; newest tokens first.
PLACES = torch.tensor(
    [
        [3, 1, 3, 3, 1],  # rows
        [0, 0, 1, 2, 1],  # among the carried tokens
        [0, 5, 1, 2, 6],  # among the 7 tokens
        [0, 4, 1, 2, 5],  # among the 6 samples
        [0, 2, 0, 1, 4],  # sequences of the newest, places of the drafts
        [3, 2, 3, 3, 2],  # tokens of the sequence
    ]
)
TABLES = torch.tensor([[0] * 4, [9, 5, 0, 0], [0] * 4, [2, 8, 6, 7], [0] * 4], dtype=torch.int32)


@OPS
def test_a_step_goes_on_from_the_last_one(ops: ModuleType, device: torch.device) -> None:
    inputs = blank_inputs(device)
    given = PLACES.to(device), 2, TABLES.to(device), BLOCK_SIZE
    ops.take_carried(carried(device), inputs, *given)
    assert inputs.input_ids.tolist() == [90, 91, 92, -9, -9, 70, 71]
    assert inputs.positions.tolist() == [11, 12, 13, -9, -9, 6, 7]
    assert inputs.slots.tolist() == [27, 28, 29, -9, -9, 22, 23]
    assert inputs.context_lens.tolist() == [14, -9, 8]
    assert inputs.next_token_ids is not None
    assert inputs.next_token_ids.tolist() == [91, 92, -9, -9, -9, 71, -9]
    assert inputs.sampled_positions is not None
    assert inputs.sampled_positions.tolist() == [12, 13, 14, -9, 7, 8]
    assert inputs.drafts is not None
    assert inputs.drafts.tolist() == [[91, 92], [-2, -2], [71, -2]]
    greedy = blank_inputs(device, is_greedy=True)
    ops.take_carried(carried(device), greedy, *given)
    assert greedy.input_ids.equal(inputs.input_ids)
    assert greedy.context_lens.equal(inputs.context_lens)


@OPS
def test_a_step_leaves_its_newest_tokens(ops: ModuleType, device: torch.device) -> None:
    """After 2 and 0 accepted drafts; where none could be chosen there is 0."""
    kept = carried(device)
    places = torch.tensor([[4, 1], [2, 6]], device=device)
    token_ids = torch.tensor([[5, 6, 7], [-1, 8, 9]], device=device)
    accepted = torch.tensor([2, 0], device=device)
    positions = torch.arange(20, 30, device=device)
    drafts = torch.tensor([[40, 41, 42, 99], [50, 51, 52, 99]], device=device)[:, :3]
    ops.leave_carried(kept, places, token_ids, accepted, positions, drafts)
    assert kept.token_ids[[4, 1]].tolist() == [[7, 40, 41, 42], [0, 50, 51, 52]]
    assert kept.positions.tolist() == [0, 27, 0, 11, 25]
    untouched = kept.token_ids[3].tolist()
    # Without drafts only the newest token counts.
    ops.leave_carried(kept, places, token_ids[:, :1], accepted * 0, positions, None)
    assert kept.token_ids[[4, 1], 0].tolist() == [5, 0]
    assert kept.positions.tolist() == [0, 27, 0, 11, 23]
    assert kept.token_ids[3].tolist() == untouched == [90, 91, 92, 0]


def test_many_rows_in_tiles(device: torch.device) -> None:
    """More tokens than a tile, through both."""
    generator = torch.Generator().manual_seed(0)
    count, rows = 300, 400
    kept = CarriedTokens(
        torch.randint(0, 1000, (rows, 1), generator=generator).to(device),
        torch.randint(0, 64, (rows,), generator=generator).to(device),
    )
    chosen = torch.randperm(rows, generator=generator)[:count]
    order, zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    places = torch.stack((chosen, zero, order, order, order, zero + 1)).to(device)
    tables = torch.randint(0, 9000, (rows, 16), generator=generator, dtype=torch.int32).to(device)
    results = []
    for ops in (torch_ops, triton_ops):
        blank = [torch.zeros(count, dtype=torch.int64, device=device) for _ in range(3)]
        lens = torch.zeros(count, dtype=torch.int32, device=device)
        inputs = CarriedInputs(*blank, lens, None, None, None)
        ops.take_carried(kept, inputs, places, count, tables, BLOCK_SIZE)
        results.append([*blank, lens])
    for one, other in zip(*results, strict=True):
        assert one.equal(other)
        assert one.any()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    given = carried(device), blank_inputs(device)
    with pytest.raises(ValueError, match=r"places \[6, A\]"):
        triton_ops.take_carried(*given, PLACES[:5].to(device), 2, TABLES.to(device), BLOCK_SIZE)
    one = torch.ones(1, 1, dtype=torch.int64, device=device)
    drafts = one.expand(1, 4)
    with pytest.raises(ValueError, match="at most 3 drafts"):
        triton_ops.leave_carried(given[0], one.expand(2, 1), one, one[0], one[0], drafts)
