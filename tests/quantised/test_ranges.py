"""Scales that no model can use, and sizes of groups that no matrix has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from quantised.packing import Packed, layer_context, logits, quantised
from quantised.quark_schemes import FP8, FP8_CHANNEL, FP8_TOKEN, INT4_GROUP, pack_ptpc, quark

from atom.config import ConfigError
from atom.distributed.parallel_state import SINGLE
from atom.model_loader.errors import WeightError
from atom.model_ops.moe import FusedMoE
from atom.model_ops.quant.formats.table import parse_quantization
from atom.model_ops.quant.scales import largest
from atom.model_ops.quant.storage import check_range
from atom.model_ops.quant.weights import Activations, QuantWeights, WeightFormat, dequantise

PTPC = quark(FP8_CHANNEL, FP8_TOKEN, exclude=["lm_head"])


def fp8(values: float, row_scale: float, *experts: int) -> QuantWeights:
    codes = torch.full((*experts, 4, 32), values).to(torch.float8_e4m3fn)
    scale = torch.full((*experts, 4), row_scale)
    return QuantWeights(WeightFormat("fp8", has_row_scale=True), codes, row_scale=scale)


def mxfp4(exponent: int) -> QuantWeights:
    codes = torch.full((4, 16), 0x77, dtype=torch.uint8)
    scale = torch.full((4, 1), exponent, dtype=torch.uint8)
    return QuantWeights(WeightFormat("fp4", 1, 32, "e8m0"), codes, scale)


def int4(scale: float, zero: int) -> QuantWeights:
    codes = torch.zeros(4, 16, dtype=torch.uint8)
    form = WeightFormat("int4", 1, 32, has_zeros=True)
    zeros = torch.full((4, 1), zero, dtype=torch.uint8)
    return QuantWeights(form, codes, torch.full((4, 1), scale), zeros)


@pytest.mark.parametrize(
    ("weights", "dtype", "message"),
    [
        (fp8(448, 1000), torch.float16, "weights up to 448000 do not fit float16"),
        (fp8(448, 1000, 3), torch.float16, "weights up to 448000 do not fit float16"),
        (fp8(448, 1e37), torch.float32, "4.48e[+]39 do not fit float32"),
        (mxfp4(254), torch.bfloat16, "1.02085e[+]39 do not fit bfloat16"),
        (int4(5000, 16), torch.float16, "80000 do not fit float16"),
        (fp8(1, float("nan")), torch.bfloat16, "nan do not fit bfloat16"),
    ],
)
def test_weights_that_overflow(weights: QuantWeights, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_range(weights, dtype)


def test_weights_that_fit() -> None:
    """Also those whose scale would be too large for larger codes."""
    check_range(fp8(448, 1000), torch.bfloat16)
    check_range(fp8(2, 1000, 3), torch.float16)
    check_range(mxfp4(251), torch.bfloat16)
    check_range(mxfp4(0), torch.float16)
    check_range(int4(5000, 13), torch.float16)


def pack_large(out: int, columns: int) -> Packed:
    packed = pack_ptpc(out, columns)
    scale = packed.tensors["weight_scale"] * 0 + 1e6
    return Packed({**packed.tensors, "weight_scale": scale}, packed.weight)


def test_a_model_names_the_layer(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder

    def pack(module: str, out: int, columns: int) -> Packed | None:
        if module == "lm_head":
            return None
        return (pack_large if "down_proj" in module else pack_ptpc)(out, columns)

    stored, _ = quantised(folder, PTPC, pack)
    assert logits(stored, torch.bfloat16).isfinite().all()
    with pytest.raises(
        WeightError, match=r"0\.mlp\.down_proj: weights up to .* do not fit float16"
    ):
        logits(stored, torch.float16)


def test_experts_are_checked() -> None:
    context = layer_context(parse_quantization(PTPC, {}), SINGLE, torch.float16)
    layer = FusedMoE(2, 2, 64, 32, context, "m.experts")
    for expert in range(2):
        for part, shape in {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}.items():
            pack = pack_large if (expert, part) == (1, "down") else pack_ptpc
            for name, values in pack(*shape).tensors.items():
                placed = layer.place_weight(f"{expert}.{part}_proj.{name}")
                assert placed is not None
                layer.load_weight(placed[0], values, placed[1])
    with pytest.raises(ValueError, match="do not fit float16"):
        layer.process_after_loading()


@pytest.mark.parametrize("scale", [-0.5, float("inf"), float("nan")])
def test_scales_of_inputs_must_be_positive(scale: float) -> None:
    how = Activations("fp8", is_static=True)
    with pytest.raises(ValueError, match="must be positive and finite"):
        largest(torch.tensor([0.5, scale]), how)
    with pytest.raises(ValueError, match="must be positive and finite"):
        largest(torch.zeros(2), how)
    assert largest(torch.tensor([0.5, 0.0, 0.25]), how) == 0.5  # an expert without tokens


def test_groups_larger_than_the_matrix() -> None:
    codes = torch.arange(64, dtype=torch.int8).view(4, 16)
    for rows, columns in ((1, 10**12), (10**12, 8), (10**12, 10**12)):
        scale = torch.full((4 if rows == 1 else 1, 2 if columns == 8 else 1), 0.5)
        weights = QuantWeights(WeightFormat("int8", rows, columns), codes, scale)
        assert torch.equal(dequantise(weights), codes * 0.5)


def compressed(weights: dict[str, Any]) -> dict[str, Any]:
    is_float = "block_structure" in weights
    numbers = {"num_bits": 8, "type": "float" if is_float else "int"}
    group = {"targets": ["Linear"], "weights": {**numbers, **weights}}
    layout = "float-quantized" if is_float else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
    }


BLOCK = {**FP8, "qscheme": "per_block"}


@pytest.mark.parametrize("size", [0, -3, 65537, 10**10, 10**21, 64.0, True])
def test_sizes_that_are_refused(size: object) -> None:
    for config, key in (
        (compressed({"strategy": "group", "group_size": size}), "group_size"),
        (compressed({"strategy": "block", "block_structure": [128, size]}), "block_structure"),
        (compressed({"strategy": "block", "block_structure": f"{size}x128"}), "block_structure"),
        (quark({**INT4_GROUP, "group_size": size}), "group_size"),
        (quark({**BLOCK, "block_size": [size, 128]}), "block_size"),
    ):
        with pytest.raises(ConfigError, match=rf"{key}='?{size}'? is no size from 1 to 65536"):
            parse_quantization(config, {})
