"""Products whose inputs are split: the last program of a tile adds the parts, in their order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_triton_moe import problem, tiles_on
from test_triton_quant_linear import IN_CODES, WEIGHT_ONLY, platforms_on, random_weights

from atom.model_ops.kernels.triton.products import linear, moe_experts, quant_linear, quant_splits
from atom.model_ops.kernels.triton.products.quant_layout import prepare_tiles
from atom.model_ops.kernels.triton.splits import arrivals
from atom.model_ops.quant.weights import WeightFormat

_TURNS_ON_A_GPU = 50
_ROWS, _INPUTS, _SPLITS = 200, 1280, 5


def in_any_order(product: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """The result, the same whichever program arrives last; the next product finds none arrived.

    Interpreted, programs run with the first split first, then with the last; on a GPU as it comes.
    """
    first = product()
    if device.type == "cpu":
        from interpreter import last_splits_first

        with last_splits_first():
            others = [product()]
    else:
        others = [product() for _ in range(_TURNS_ON_A_GPU)]
    assert all(torch.equal(other, first) for other in others)
    assert not arrivals(device).any()
    return first


@pytest.fixture
def few_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits are shorter than on a GPU."""
    monkeypatch.setattr(quant_splits, "_LEAST_INPUTS", _INPUTS // _SPLITS)


@pytest.mark.usefixtures("few_inputs")
@pytest.mark.parametrize("form", [WEIGHT_ONLY[0], IN_CODES[0], IN_CODES[4]], ids=str)
def test_quantised_weights(
    form: WeightFormat, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of programs that sum all splits themselves."""
    platform = platforms_on(device)[0]
    weights = prepare_tiles(random_weights(form, _ROWS, _INPUTS, device), platform)
    x, bias = torch.randn(18, _INPUTS, device=device), torch.randn(_ROWS, device=device)

    def product() -> torch.Tensor:
        return quant_linear.product(platform.kind, x, weights, bias)

    split = quant_splits.choose_splits(platform.kind, _ROWS, _INPUTS, weights.block_k)
    assert split == _SPLITS
    apart = in_any_order(product, device)
    monkeypatch.setattr(quant_linear, "BUSY", {})
    assert torch.equal(product(), apart)


@pytest.mark.usefixtures("few_inputs")
def test_plain_weights(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of programs that sum all splits themselves."""
    kind = platforms_on(device)[0].kind
    x, weight = (torch.randn(rows, _INPUTS, device=device) for rows in (18, _ROWS))
    bias = torch.randn(_ROWS, device=device)

    def product() -> torch.Tensor:
        return linear.product(kind, x, weight, bias, x.dtype)

    apart = in_any_order(product, device)
    monkeypatch.setattr(linear, "BUSY", {})
    assert torch.equal(product(), apart)


def test_experts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_experts, "choose_splits", lambda *_: _SPLITS)
    kind = tiles_on(device)[0]
    given = problem(3, 3, device, torch.float32, hidden=320, inter=48)
    in_any_order(lambda: moe_experts.mixture(kind, *given), device)
