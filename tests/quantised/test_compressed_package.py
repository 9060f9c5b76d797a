"""Matrices that the package `compressed-tensors` writes are those that it reads back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantised.compressed import FORMATS, config, floats
from quantised.packing import layer_context

from atom.distributed.parallel_state import SINGLE
from atom.model_ops.linear import ReplicatedLinear
from atom.model_ops.quant.base import Header
from atom.model_ops.quant.formats.compressed_tensors import Modules
from atom.model_ops.quant.formats.table import parse_quantization
from atom.model_ops.quant.weights import dequantise

pytest.importorskip("compressed_tensors")

OUT, COLUMNS = 48, 96
MX8 = config("mxfp8-quantized", floats(8, "group", 32, scale_dtype="torch.uint8"))
BLOCKS = config("naive-quantized", floats(8, "block", block_structure=[16, 32]))
SETTINGS = {name: FORMATS[name][0] for name in FORMATS if not name.startswith("int4 channel z")}
SETTINGS |= {"mxfp8": MX8, "fp8 block": BLOCKS}


def written(settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The stored tensors of a random matrix, and the matrix that the package makes of them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    args = scheme.weights
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUT, COLUMNS, generator=generator) * (1 + torch.arange(COLUMNS) % 5)
    rows, size = {
        "tensor": (OUT, COLUMNS),
        "channel": (1, COLUMNS),
        "block": tuple(args.block_structure or (0, 0)),
    }.get(args.strategy, (1, args.group_size))
    blocks = weight.unflatten(1, (-1, size)).unflatten(0, (-1, rows))
    low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = (448 * 6 / weight.abs().max()).float().view(1)
    scale, zeros = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zeros}
    if args.strategy == "tensor":
        state |= {name: state[name].view(1) for name in ("weight_scale", "weight_zero_point")}
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    stored = compressor.compress(state, scheme)
    if scheme.input_activations is not None and scheme.input_activations.strategy == "tensor_group":
        stored["input_global_scale"] = torch.ones(1)  # from calibration, not of the compressor
    return dict(stored), compressor.decompress(dict(stored), scheme)["weight"]


@pytest.mark.parametrize("name", SETTINGS)
def test_it_reads_the_same_weights(name: str) -> None:
    stored, expected = written(SETTINGS[name])
    headers = {f"a.{key}": Header(value.dtype, tuple(value.shape)) for key, value in stored.items()}
    parsed = parse_quantization(SETTINGS[name], headers)
    layer = ReplicatedLinear(COLUMNS, OUT, False, layer_context(parsed, SINGLE), "a")
    for key, value in stored.items():
        layer.load_weight(key, value, None)
    weights = dequantise(layer.storage.take(), torch.float64)
    assert expected.std() > 0.1
    rtol = 1e-6 if expected.dtype is torch.float32 else 1e-2  # bfloat16
    torch.testing.assert_close(weights, expected.double(), rtol=rtol, atol=1e-6)


def test_names_are_matched_alike() -> None:
    from compressed_tensors.utils import match_name

    name = "language_model.model.layers.1.mlp.experts.3.down_proj"
    for text in (name, name[:-5], "re:.*experts", "re:experts", r"re:.*mlp\.down_proj", "Linear"):
        assert Modules("ignore", [(text, True)]).find(name) == (match_name(name, text) or None)
