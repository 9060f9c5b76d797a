"""NVIDIA ModelOpt: FP8, NVFP4 and MXFP8, in config.json and in hf_quant_config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.harness import load_model
from quantised import activations, compressed
from quantised.packing import (
    Pack,
    Packed,
    assert_same_model,
    logits,
    quantised,
    split_products,
)

from atom.config import ConfigError
from atom.model_loader.weights import WeightError
from atom.model_ops.quant.base import Header
from atom.model_ops.quant.formats.table import parse_quantization

INPUT_SCALE = 0.004


def config(algorithm: str, **more: Any) -> dict[str, Any]:
    settings = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
    return {"quant_method": "modelopt", **settings, "exclude_modules": ["lm_head"], **more}


def renamed(pack: Pack, algorithm: str) -> Pack:
    """A matrix of compressed-tensors with ModelOpt's names."""

    def write(module: str, out: int, columns: int) -> Packed | None:
        packed = pack(module, out, columns)
        if packed is None:
            return None
        tensors, weight = dict(packed.tensors), packed.weight
        if "weight_packed" in tensors:
            tensors["weight"] = tensors.pop("weight_packed")
        if "weight_global_scale" in tensors:
            factor = 0.02 + (0.01 if "up_proj" in module else 0)
            weight = weight * float(tensors.pop("weight_global_scale"))
            tensors["weight_scale_2"] = torch.tensor(factor)
            weight = weight * tensors["weight_scale_2"].double()
        if algorithm in ("FP8", "NVFP4"):
            tensors["input_scale"] = torch.tensor(INPUT_SCALE)
        scale = tensors["weight_scale"]
        if algorithm == "FP8":
            tensors["weight_scale"] = scale.view(()).float()
        elif algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            tensors["weight_scale"] = scale.view(-1).float()
        elif algorithm == "FP8_PB_WO":
            tensors["weight_scale"] = scale[:, None, :, None].float()
        return Packed(tensors, weight)

    return write


Quantise = Callable[[torch.Tensor], torch.Tensor]
FORMATS: dict[str, tuple[Pack, Quantise | None]] = {
    "FP8": (compressed.bytes_of("fp8", 0, 0), lambda x: activations.fp8_static(x, INPUT_SCALE)),
    "FP8_PER_CHANNEL_PER_TOKEN": (compressed.bytes_of("fp8", 1, 0), activations.fp8_tokens),
    "FP8_PB_WO": (compressed.bytes_of("fp8", 128, 128), None),
    "NVFP4": (compressed.pack_nvfp4(), lambda x: activations.nvfp4(x, INPUT_SCALE)),
    "W4A16_NVFP4": (compressed.pack_nvfp4(), None),
    "MXFP8": (compressed.pack_mx(8), lambda x: activations.fp8_groups(x, 32, powers=True)),
}


def writer(algorithm: str) -> Pack:
    return renamed(FORMATS[algorithm][0], algorithm)


@pytest.mark.parametrize("algorithm", FORMATS)
@pytest.mark.usefixtures("exact_activations")
def test_weights(tmp_path: Path, algorithm: str) -> None:
    sizes = {"hidden_size": 160, "intermediate_size": 192} if algorithm == "FP8_PB_WO" else {}
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1, **sizes).folder
    assert_same_model(*quantised(folder, config(algorithm.lower()), writer(algorithm)))


@pytest.mark.usefixtures("exact_activations")
def test_experts_of_kimi(tmp_path: Path) -> None:
    """As NVIDIA publishes it: config in a file of its own, all but routed experts excluded."""
    globs = ["language_model.model.layers.*.self_attn*", "*shared_experts*", "lm_head"]
    excluded = [*globs, "language_model.model.layers.0*", "mlp.gate", "vision_tower*"]
    folder = checkpoints.kimi_k25(tmp_path / "plain", num_hidden_layers=2).folder
    write = writer("NVFP4")
    stored, dense = quantised(
        folder,
        {},
        lambda module, *shape: write(module, *shape) if ".experts." in module else None,
    )
    checkpoints.edit_config(stored, quantization_config=None)
    described = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": excluded}
    file = {"producer": {"name": "modelopt"}, "quantization": described}
    (stored / "hf_quant_config.json").write_text(json.dumps(file))
    assert_same_model(stored, dense)


@pytest.mark.parametrize("algorithm", FORMATS)
def test_quantised_inputs(algorithm: str) -> None:
    packed = writer(algorithm)("a.o_proj", 64, 256)
    assert packed is not None
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    parsed = parse_quantization(config(algorithm), {})
    product, _ = split_products(parsed, packed.tensors, x, 64, 1)
    quantise = FORMATS[algorithm][1]
    expected = (x.double() if quantise is None else quantise(x)) @ packed.weight.T
    difference = (expected - x.double() @ packed.weight.T).abs().max()
    assert (difference > 1e-3) == (quantise is not None)
    torch.testing.assert_close(product.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", FORMATS)
@pytest.mark.usefixtures("exact_activations")
def test_ranks_reproduce_the_product(algorithm: str, size: int) -> None:
    columns = 512 if algorithm == "FP8_PB_WO" else 128
    packed = writer(algorithm)("o_proj", 64, columns)
    assert packed is not None
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
    expected = (x.double() @ packed.weight.T).float()
    parsed = parse_quantization(config(algorithm), {})
    for product in split_products(parsed, packed.tensors, x, 64, size):
        torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("exact_activations")
def test_layers_of_different_algorithms(tmp_path: Path) -> None:
    """`MIXED_PRECISION`: those that are not listed are plain numbers; the cache has scales."""
    layers = {
        **{f"model.layers.0.self_attn.{part}_proj": {"quant_algo": "FP8"} for part in "qkvo"},
        "model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 16},
    }
    settings = config("MIXED_PRECISION", quantized_layers=layers, kv_cache_quant_algo="FP8")

    def pack(module: str, out: int, columns: int) -> Packed | None:
        if "layers.0" not in module:
            return None
        packed = writer("FP8" if "attn" in module else "NVFP4")(module, out, columns)
        if packed is None or "k_proj" not in module:
            return packed
        return Packed({**packed.tensors, "k_scale": torch.tensor(0.5)}, packed.weight)

    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=2).folder
    stored, dense = quantised(folder, settings, pack)
    assert_same_model(stored, dense)
    model = load_model(stored, max_model_len=16)
    scales = [b.tolist() for name, b in model.named_buffers() if name.endswith("kv_scale.given")]
    assert scales == [[0.5, 0.0], [0.0, 0.0]]


MLP = "model.layers.1.mlp"
GATE_UP = f"{MLP}.gate_up_proj", (f"{MLP}.gate_proj", f"{MLP}.up_proj")


@pytest.mark.parametrize(
    ("entry", "is_excluded"),
    [
        (f"{MLP}.down_proj", True),
        (MLP, True),
        ("model.layers.*", True),
        ("model.layers.*.mlp*", True),
        ("*down_proj", True),
        ("mlp", True),
        ("layers.1", True),
        ("model.layers", True),
        ("model.layers.1?", False),
        ("model.layers.10", False),
        ("mlp.down", False),
        ("lm_head", False),
    ],
)
def test_which_modules_are_excluded(entry: str, is_excluded: bool) -> None:
    for key in ("exclude_modules", "ignore"):
        parsed = parse_quantization({**config("FP8"), "exclude_modules": [], key: [entry]}, {})
        assert (parsed.method_for(f"{MLP}.down_proj") is None) == is_excluded
        assert (parsed.method_for(f"language_model.{MLP}.down_proj") is None) == is_excluded


def test_parts_of_one_product_and_the_head() -> None:
    def excluding(*entries: str) -> Any:
        return parse_quantization(config("FP8", exclude_modules=list(entries)), {})

    assert excluding(*GATE_UP[1]).method_for(*GATE_UP) is None
    assert excluding(GATE_UP[0]).method_for(*GATE_UP) is None
    with pytest.raises(ConfigError, match=r"gate_proj is stored as FP8 and .*up_proj as unquant"):
        excluding("*up_proj").method_for(*GATE_UP)
    assert excluding().method_for("lm_head", (), "head") is None
    stored = {"lm_head.weight_scale": Header(torch.float32, ())}
    parsed = parse_quantization(config("FP8", exclude_modules=[]), stored)
    assert parsed.method_for("lm_head", (), "head") is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config("NVFP4_AWQ"), "quant_algo='NVFP4_AWQ' is not supported; supported: FP8, "),
        (config("W4A8_AWQ", quant_method="modelopt_fp4"), "quant_algo='W4A8_AWQ'"),
        ({"quant_method": "modelopt"}, "quant_algo=None"),
        (config("NVFP4", group_size=32), "group_size=32 of NVFP4"),
        (config("MIXED_PRECISION"), "quantized_layers=None"),
        (
            config("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "INT4"}}),
            "quantized_layers.a: quant_algo='INT4'",
        ),
        (config("FP8", exclude_modules="lm_head"), "exclude_modules='lm_head'"),
        (config("FP8", kv_cache_quant_algo="NVFP4"), "kv_cache_quant_algo='NVFP4'"),
        (config("FP8", kv_cache_scheme={"num_bits": 4, "type": "float"}), "kv_cache_scheme="),
    ],
)
def test_what_is_not_supported_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_quantization(settings, {})


def test_scaled_inputs_are_refused() -> None:
    scaled = {"a.pre_quant_scale": Header(torch.bfloat16, (16,))}
    with pytest.raises(ConfigError, match=r"a\.pre_quant_scale \(AWQ\)"):
        parse_quantization(config("NVFP4"), scaled)


def test_a_cache_alone_may_be_quantised(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder
    expected = logits(folder)
    file = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(file))
    torch.testing.assert_close(logits(folder), expected)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {}}))
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: .*quant_algo=None"):
        logits(folder)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("weight_scale_2", None, r"missing .*o_proj.weight_scale_2"),
        ("weight_scale", torch.ones(3, 48).to(torch.float8_e4m3fn), r"\[3, 48\].*wants \[48, 3\]"),
        ("weight_scale", torch.ones(48, 3), "holds torch.float32"),
        ("input_scale", torch.tensor(float("inf")), "NaN or infinite"),
    ],
)
def test_damaged_checkpoints(
    tmp_path: Path, name: str, values: torch.Tensor | None, message: str
) -> None:
    def pack(module: str, out: int, columns: int) -> Packed | None:
        packed = writer("NVFP4")(module, out, columns)
        if packed is None or "o_proj" not in module:
            return packed
        tensors = {key: values if key == name else t for key, t in packed.tensors.items()}
        return Packed({k: t for k, t in tensors.items() if t is not None}, packed.weight)

    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder
    stored, _ = quantised(folder, config("NVFP4"), pack)
    with pytest.raises(WeightError, match=message):
        logits(stored)
