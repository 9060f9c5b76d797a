"""`quant_method: compressed-tensors`: which modules are quantised, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantised.compressed import INT4, INT8_TOKENS, config, floats, ints

from atom.config import ConfigError
from atom.model_ops.quant.base import Header
from atom.model_ops.quant.formats.table import parse_quantization


def method_of(settings: dict[str, Any], *names: str, kind: Any = "linear") -> str | None:
    """The format of a layer, or of one that stacks several."""
    parsed = parse_quantization(settings, {})
    prefix, parts = names[0], names[1:]
    method = parsed.method_for(prefix, parts, kind)
    return None if method is None else str(method.format)


MLP = "model.layers.0.mlp"
GATE_UP = f"{MLP}.gate_up_proj", f"{MLP}.gate_proj", f"{MLP}.up_proj"


def grouped(ignore: list[str], **targets: list[str]) -> dict[str, Any]:
    """int4 for the targets of `four`, int8 for those of `eight`."""
    schemes = {"four": ints(4, 32), "eight": ints(8, 32)}
    settings = config("pack-quantized", {}, ignore=ignore)
    groups = {
        name: {"targets": listed, "weights": schemes[name]} for name, listed in targets.items()
    }
    return {**settings, "config_groups": groups}


def test_which_modules_are_ignored() -> None:
    down = f"{MLP}.down_proj"
    for entry, is_ignored in {
        down: True,
        "model.layers.0.mlp": False,
        "down_proj": False,
        "re:down_proj": False,
        "re:.*down": True,
        r"re:model\.layers\.[0-3]\.": True,
        "re:layers": False,
        "Linear": True,
    }.items():
        found = method_of(grouped([entry], four=["Linear"]), down)
        assert (found is None) == is_ignored, entry
    fours = grouped(["re:.*gate_up_proj"], four=["Linear"])
    assert method_of(fours, *GATE_UP) is None
    assert method_of(grouped([GATE_UP[0]], four=["Linear"]), *GATE_UP) is None
    assert method_of(grouped(list(GATE_UP[1:]), four=["Linear"]), *GATE_UP) is None
    for entry in (GATE_UP[1], "re:.*up_proj"):
        with pytest.raises(ConfigError, match=r"gate_proj is stored as .*up_proj as .*must be"):
            method_of(grouped([entry], four=["Linear"]), *GATE_UP)


def test_which_target_a_module_has() -> None:
    """A name comes before the class, the fused name before those of its parts."""
    down = f"{MLP}.down_proj"
    four, eight = "int4 group 32 weight-only", "int8 group 32 weight-only"
    settings = grouped([], four=["Linear"], eight=["re:.*down_proj"])
    assert method_of(settings, down) == eight
    assert method_of(settings, *GATE_UP) == four
    assert method_of(grouped([], eight=[down]), *GATE_UP) is None
    assert method_of(grouped([], four=["re:.*proj"], eight=[GATE_UP[0]]), *GATE_UP) == eight
    with pytest.raises(ConfigError, match=r"gate_proj is .*int4 per group 32 .*up_proj as .*int8"):
        method_of(grouped([], four=["Linear"], eight=[GATE_UP[2]]), *GATE_UP)
    head = grouped([], four=["Linear"])
    assert method_of(head, "lm_head", kind="head") is None
    assert method_of(grouped([], eight=["lm_head"]), "lm_head", kind="head") == eight
    stored = {"lm_head.weight_scale": Header(torch.bfloat16, (96, 2))}
    assert parse_quantization(head, stored).method_for("lm_head", (), "head") is not None


@pytest.mark.parametrize(
    ("preset", "layout", "method"),
    [
        ("W4A16", "pack-quantized", "int4 group 128 weight-only"),
        ("W4A16_ASYM", "pack-quantized", "int4 group 128 with zeros weight-only"),
        ("W8A8", "int-quantized", "int8 channel x int8 per token"),
        ("FP8", "float-quantized", "fp8 channel x fp8 static"),
        ("fp8_dynamic", "float-quantized", "fp8 channel x fp8 per token"),
        ("FP8_BLOCK", "float-quantized", "fp8 block 128x128 x fp8 per group 128"),
        ("NVFP4", "nvfp4-pack-quantized", "fp4 group 16 e4m3 x fp4 per group 16 e4m3"),
        ("MXFP4A16", "mxfp4-pack-quantized", "fp4 group 32 e8m0 weight-only"),
        ("MXFP8", "mxfp8-quantized", "fp8 group 32 e8m0 x fp8 per group 32 e8m0"),
    ],
)
def test_presets(preset: str, layout: str, method: str) -> None:
    settings = {**config(layout, {}), "config_groups": {preset: ["Linear"]}}
    assert method_of(settings, f"{MLP}.down_proj") == method


def edited(**weights: Any) -> dict[str, Any]:
    return config("pack-quantized", {**ints(4, 32), **weights})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config("sparse-bitmask", ints(4, 32)), "group_0: format='sparse-bitmask'"),
        (config("marlin-24", ints(4, 32)), "format='marlin-24' is not supported; supported: pack"),
        (config("dense", ints(4, 32)), "format='dense'"),
        (config("mixed-precision", ints(4, 32)), "format='mixed-precision'"),
        (edited(num_bits=3), "num_bits=3 and type='int'"),
        (edited(strategy="head"), "weights: strategy='head'"),
        (edited(strategy="tensor"), "strategy='tensor'"),
        (edited(group_size=None), "group_size=None"),
        (edited(dynamic=True), "dynamic=True"),
        (config("float-quantized", floats(8, "channel", symmetric=False)), "symmetric=False"),
        (config("float-quantized", floats(8, "block", block_structure=[1])), r"structure=\[1\]"),
        (config("nvfp4-pack-quantized", floats(4, "tensor_group", 32)), "group_size=32"),
        (
            config("int-quantized", ints(8, None), {**INT8_TOKENS, "symmetric": False}),
            "input_activations: symmetric=False",
        ),
        (
            config("int-quantized", ints(8, None), {**INT8_TOKENS, "strategy": "tensor"}),
            "input_activations: type='int', num_bits=8, strategy='tensor', dynamic=True",
        ),
        ({**INT4, "config_groups": {"W3A16": ["Linear"]}}, "preset='W3A16'"),
        ({**INT4, "config_groups": {"a": {"targets": ["Linear"], "weights": None}}}, "weights=No"),
        (
            {**INT4, "config_groups": {"a": {"targets": [], "output_activations": INT8_TOKENS}}},
            "a: output_activations=",
        ),
        ({**INT4, "ignore": ["re:("]}, r"ignore holds 're:\('"),
        ({**INT4, "quantization_status": "initialized"}, "quantization_status='initialized'"),
        ({**INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config=.*bitmask"),
        ({**INT4, "transform_config": {"config_groups": {"u": {}}}}, "transform_config="),
        ({**INT4, "kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme="),
    ],
)
def test_what_is_not_supported_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_quantization(settings, {})
