"""Rows of tables: Triton's kernels copy what torch's operations do."""

from __future__ import annotations

import pytest
import torch
from same_numbers import check, random

from atom.model_ops.kernels.torch import gather as torch_ops
from atom.model_ops.kernels.triton import gather as triton_ops
from atom.model_ops.registry import OpQuery
from atom.platform import Platform


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("count", [0, 1, 7, 150])
def test_options_of_rows(count: int, repeats: int, device: torch.device) -> None:
    options = torch.randn(7, 19, generator=torch.Generator().manual_seed(0))
    seeds, rows = torch.arange(19) * 2**40, random(count)(0, 19, count)
    ops = triton_ops.sampling_options, torch_ops.sampling_options
    check(*ops, device, options, seeds, rows, repeats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 40, 1500])
def test_rows_of_a_share_of_the_vocabulary(
    dtype: torch.dtype, size: int, device: torch.device
) -> None:
    """Zeros for tokens before and behind it."""
    weight = torch.randn(30, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    ops = triton_ops.share_embedding, torch_ops.share_embedding
    for count in (0, 1, 50):
        ids = random(count)(0, 90, count)
        check(*ops, device, ids, weight, 30, torch_ops.embedding)
    ids = torch.tensor([29, 30, 59, 60], device=device)
    rows = triton_ops.share_embedding(ids, weight.to(device), 30, torch_ops.embedding)
    assert rows.any(dim=1).tolist() == [False, True, True, False]


def test_a_share_is_looked_up_as_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    query = OpQuery(Platform("rocm", "gfx942", True), torch.bfloat16, {"size": 64})
    assert triton_ops.refuses_share(query) is None
    monkeypatch.setenv("ATOM_OP_EMBEDDING", "torch")
    assert "ATOM_OP_EMBEDDING=torch" in str(triton_ops.refuses_share(query))


@pytest.mark.parametrize(("count", "each"), [(1, 1), (3, 1), (5, 4), (2, 37)])
@pytest.mark.parametrize("width", [1, 9, 1500])
def test_inputs_of_a_graph(count: int, each: int, width: int, device: torch.device) -> None:
    integers = random(count + width)
    tables = integers(0, 2**31 - 1, 11, width + 5).int().to(device)[:, :width]
    rows = integers(0, 11, count).to(device)
    tokens = (integers(0, 9999, count * each).to(device) for _ in range(2))
    given = *tokens, integers(0, count * each, count * each).to(device)
    results = []
    for ops in (triton_ops, torch_ops):
        out = torch.full((count, width), -1, dtype=torch.int32, device=device)
        results.append([out, *ops.take_inputs(tables, rows, out, *given)])
    for got, wanted in zip(*results, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    eight = torch.arange(8, device=device)
    with pytest.raises(ValueError, match="sampling_options wants"):
        triton_ops.sampling_options(eight[None].float(), eight, eight[::2])
    tables = torch.zeros(4, 8, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="take_inputs wants tables with 7"):
        triton_ops.take_inputs(tables, eight[:2], tables[:2, :7], eight, eight, eight)
