"""Offsets, scales that have scales, and six-bit codes of `QuantWeights`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from atom.model_ops.kernels.triton.products.quant_layout import refuses_tiles
from atom.model_ops.quant.weights import (
    QuantWeights,
    WeightFormat,
    dequantise,
    pack_int6,
    pack_nibbles,
    unpack_int6,
)

Q4_1 = WeightFormat("int4", 1, 32, has_offsets=True)
Q4_K = WeightFormat("int4", 1, 32, "int8", has_offsets=True, super_columns=256)
Q6_K = WeightFormat("int6", 1, 16, "int8", super_columns=256)


def test_int6_codes_are_nibbles_then_pairs_of_bits() -> None:
    codes = torch.tensor([[0x01, 0x12, 0x23, 0x34, 0x3F, 0x00, 0x20, 0x1A]], dtype=torch.uint8)
    packed = pack_int6(codes)
    assert packed.tolist() == [[0x21, 0x43, 0x0F, 0xA0, 0b11_10_01_00, 0b01_10_00_11]]
    assert torch.equal(unpack_int6(packed), codes)


def test_offsets_are_added_to_codes_from_zero() -> None:
    codes = torch.arange(64, dtype=torch.uint8).remainder(16).view(1, 64)
    scale = torch.tensor([[0.5, -0.25]], dtype=torch.float16)
    offset = torch.tensor([[3.0, 1.5]], dtype=torch.float16)
    weights = QuantWeights(Q4_1, pack_nibbles(codes), scale, offset=offset)
    assert weights.shape == (1, 64)
    expected = torch.cat((codes[0, :32] * 0.5 + 3.0, codes[0, 32:] * -0.25 + 1.5))
    assert torch.equal(dequantise(weights)[0], expected)


def test_scales_and_offsets_that_have_scales() -> None:
    codes = torch.randint(16, (2, 3, 512), dtype=torch.uint8)
    scale, offset = torch.randint(64, (2, 2, 3, 16), dtype=torch.int8)
    super_scale, super_offset = torch.randn(2, 2, 3, 2).half()
    weights = QuantWeights(
        Q4_K,
        pack_nibbles(codes),
        scale,
        offset=offset,
        super_scale=super_scale,
        super_offset=super_offset,
    )
    for expert, row, column in ((0, 0, 0), (0, 2, 255), (1, 1, 256), (1, 2, 511)):
        group, above = column // 32, column // 256
        at = (expert, row, group)
        expected = (
            codes[expert, row, column].item()
            * (scale[at].item() * super_scale[expert, row, above].item())
            + offset[at].item() * super_offset[expert, row, above].item()
        )
        assert dequantise(weights)[expert, row, column].item() == pytest.approx(expected, rel=1e-6)
    part = dequantise(weights.experts(1, 2))
    assert torch.equal(part[0], dequantise(weights)[1])


def test_int6_codes_without_offsets_are_symmetric() -> None:
    codes = torch.full((1, 256), 32, dtype=torch.uint8)
    codes[0, 20] = 30
    scale = torch.full((1, 16), -3, dtype=torch.int8)
    weights = QuantWeights(
        Q6_K, pack_int6(codes), scale, super_scale=torch.full((1, 1), 0.5, dtype=torch.float16)
    )
    assert weights.shape == (1, 256)
    dense = dequantise(weights)
    assert dense.count_nonzero() == 1
    assert dense[0, 20] == 3.0


def test_formats_say_what_they_are() -> None:
    assert str(Q4_1) == "int4 group 32 with offsets weight-only"
    assert str(Q4_K) == "int4 group 32 of 256 with offsets weight-only"
    assert str(Q6_K) == "int6 group 16 of 256 weight-only"


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 1, "columns": 32, "has_offsets": True, "has_zeros": True},
        {"rows": 1, "columns": 32, "has_offsets": True, "has_row_scale": True},
        {"has_offsets": True},
        {"rows": 1, "columns": 32, "scale_type": "int8"},
        {"rows": 1, "columns": 32, "super_columns": 256},
        {"rows": 1, "columns": 32, "scale_type": "int8", "super_columns": 100},
    ],
)
def test_contradictions_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"offsets|scales"):
        WeightFormat("int4", **wrong)


@pytest.mark.parametrize("form", [Q4_1, Q4_K, Q6_K, WeightFormat("int6", 1, 32)])
def test_tiles_of_gpus_are_refused(form: WeightFormat) -> None:
    platform = SimpleNamespace(kind="rocm", arch="gfx942")
    reason = refuses_tiles(form, 256, 512, platform)
    assert reason is not None
    assert str(form) in reason
    assert refuses_tiles(WeightFormat("int4", 1, 32), 256, 512, platform) is None
