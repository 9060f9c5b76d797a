"""The slots of cached tokens, as aiter's latent attention reads them."""

from __future__ import annotations

import pytest
import torch

from atom.model_ops.kernels.triton.attention.list_slots import _list_slots, list_slots

CONTEXTS = [1, 16, 33, 5, 40]
LENS = torch.tensor(CONTEXTS, dtype=torch.int32)
STARTS = torch.nn.functional.pad(LENS.cumsum(0, dtype=torch.int32), (1, 0))
BLOCK_SIZE, WIDTH, BOUND = 16, 9, 144


def by_definition(tables: torch.Tensor, lens: list[int], stored: list[int]) -> list[int]:
    return [
        int(tables[b, min(t, most - 1) // BLOCK_SIZE]) * BLOCK_SIZE + min(t, most - 1) % BLOCK_SIZE
        for b, (context, most) in enumerate(zip(lens, stored, strict=True))
        for t in range(context)
    ]


@pytest.mark.parametrize("padding", [None, [0, 3, 2, 1, 0]])
def test_each_token_has_its_slot(padding: list[int] | None, device: torch.device) -> None:
    """Far below the bound."""
    tables = torch.randint(10_000, (len(CONTEXTS), WIDTH), dtype=torch.int32)
    given = [t.to(device) for t in (tables, LENS, STARTS)]
    kept = None if padding is None else torch.tensor(padding, dtype=torch.int32, device=device)
    slots = list_slots(*given, BLOCK_SIZE, BOUND, len(CONTEXTS) * BOUND, kept)
    stored = [n - p for n, p in zip(CONTEXTS, padding or [0] * len(CONTEXTS), strict=True)]
    assert (slots.dtype, len(slots)) == (torch.int32, len(CONTEXTS) * BOUND)
    assert slots[: sum(CONTEXTS)].tolist() == by_definition(tables, CONTEXTS, stored)


def test_nothing_else_is_written(device: torch.device) -> None:
    """In several tiles of a sequence: a graph's bound costs no time."""
    slots = torch.full((len(CONTEXTS) * BOUND,), -7, dtype=torch.int32, device=device)
    tables = torch.randint(10_000, (len(CONTEXTS), WIDTH), dtype=torch.int32)
    given = [t.to(device) for t in (tables, LENS, STARTS)]
    _list_slots[len(CONTEXTS), BOUND // 16](*given, None, slots, WIDTH, BLOCK_SIZE, 16)
    assert slots[: sum(CONTEXTS)].tolist() == by_definition(tables, CONTEXTS, CONTEXTS)
    assert (slots[sum(CONTEXTS) :] == -7).all()
