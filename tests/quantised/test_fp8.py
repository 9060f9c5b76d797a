"""`quant_method: fp8`: DeepSeek's blocks of 128x128, and scales per tensor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.families import write_family
from quantised.packing import (
    Packed,
    assert_same_model,
    but_the_tower,
    logits,
    quantised,
    split_products,
)
from quantised.writers import over_blocks
from safetensors.torch import load_file

from atom.config import ConfigError
from atom.model_loader.weights import WeightError
from atom.model_ops.quant.formats.table import parse_quantization
from atom.model_ops.quant.scales import largest
from atom.model_ops.quant.weights import Activations, WeightFormat

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
FILE = "model.safetensors"
WIDE = {"hidden_size": 192, "intermediate_size": 320}


def codes(out: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out * 1000 + columns)
    return torch.randn(out, columns, generator=generator).to(torch.float8_e4m3fn)


def pack_blocks(powers: bool = False, name: str = "weight_scale_inv") -> Any:
    def pack(module: str, out: int, columns: int) -> Packed | None:
        if module.endswith(("lm_head", "gate", "weights_proj")):
            return None
        values = codes(out, columns)
        shape = -(-out // 128), -(-columns // 128)
        exponents = torch.arange(shape[0] * shape[1]).view(shape) % 3 - 4
        scale = torch.exp2(exponents.double()) * (1 if powers else 1.25)
        weight = values.double() * over_blocks(scale, 128, 128, out, columns)
        stored = (exponents + 127).to(torch.uint8) if powers else scale.float()
        return Packed({"weight": values, name: stored}, weight)

    return pack


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.usefixtures("exact_activations")
def test_blocks(tmp_path: Path, powers: bool) -> None:
    """Query, key and value do not start at multiples of 128 rows."""
    folder = checkpoints.llama(tmp_path / "plain", **WIDE).folder
    config = {**BLOCKS, "scale_fmt": "ue8m0"} if powers else BLOCKS
    assert_same_model(*quantised(folder, config, pack_blocks(powers)))


@pytest.mark.usefixtures("exact_activations")
def test_blocks_of_experts_and_latents(tmp_path: Path) -> None:
    folder = checkpoints.kimi_k25(tmp_path / "plain", hidden_size=160).folder
    stored, dense = quantised(folder, BLOCKS, but_the_tower(pack_blocks()))
    assert_same_model(stored, dense)


@pytest.mark.usefixtures("exact_activations")
def test_blocks_of_minimax_m2_as_published(tmp_path: Path) -> None:
    folder = write_family("minimax_m2", tmp_path / "plain", hidden_size=160).folder
    kept = ["gate", "e_score_correction_bias", "lm_head"]
    config = {**BLOCKS, "activation_scheme": "dynamic", "modules_to_not_convert": kept}
    assert_same_model(*quantised(folder, config, pack_blocks()))


@pytest.mark.usefixtures("exact_activations")
def test_blocks_of_an_indexer(tmp_path: Path) -> None:
    folder = write_family("deepseek_v32", tmp_path / "plain", hidden_size=160).folder
    stored, dense = quantised(folder, BLOCKS, pack_blocks())
    assert any("indexer.wk.weight_scale_inv" in name for name in load_file(stored / FILE))
    assert_same_model(stored, dense)


@pytest.mark.parametrize("static", [False, True])
def test_scales_per_tensor(tmp_path: Path, static: bool) -> None:
    folder = checkpoints.llama(tmp_path / "plain").folder

    def pack(module: str, out: int, columns: int) -> Packed | None:
        if module == "lm_head":
            return None
        scale = 0.1 + 0.01 * (out % 7) + (0.05 if "k_proj" in module else 0)
        tensors = {"weight": codes(out, columns), "weight_scale": torch.tensor(scale)}
        if static:
            tensors["input_scale"] = torch.tensor(0.02)
        return Packed(tensors, codes(out, columns).double() * torch.tensor(scale).double())

    scheme = "static" if static else "dynamic"
    config = {"quant_method": "fp8", "activation_scheme": scheme}
    stored, dense = quantised(folder, config, pack)
    difference = (logits(stored) - logits(dense)).abs().max() / logits(dense).abs().max()
    assert 1e-3 < difference < 0.2  # activations are rounded to 3 bits


def test_modules_that_are_not_converted(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "plain", **WIDE).folder
    mlps = [f"model.layers.{i}.mlp" for i in range(3)]
    pack = pack_blocks()
    stored, _ = quantised(
        folder,
        {**BLOCKS, "modules_to_not_convert": mlps},
        lambda module, out, columns: None if ".mlp." in module else pack(module, out, columns),
    )
    logits(stored)
    stored, _ = quantised(
        checkpoints.llama(tmp_path / "again" / "plain", **WIDE).folder,
        {**BLOCKS, "modules_to_not_convert": ["model.layers.1.self_attn.k_proj"]},
        pack,
    )
    with pytest.raises(ConfigError, match=r"k_proj as .*parts of .*qkv_proj"):
        logits(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"activation_scheme": "row"}, "activation_scheme='row'"),
        ({"scale_fmt": "e4m3"}, "scale_fmt='e4m3'"),
        ({"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        ({"store_dtype": "mxfp4"}, "store_dtype='mxfp4'"),
    ],
)
def test_keys_that_change_the_numbers(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = checkpoints.llama(tmp_path / "plain").folder
    checkpoints.edit_config(folder, quantization_config={**BLOCKS, **change})
    with pytest.raises(ConfigError, match=message):
        logits(folder)


def test_a_missing_scale_and_one_of_a_wrong_shape(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "plain", **WIDE).folder
    stored, _ = quantised(folder, BLOCKS, pack_blocks(name="weight_scale"))
    with pytest.raises(WeightError, match=r"missing .*weight_scale_inv"):
        logits(stored)

    def transposed(module: str, out: int, columns: int) -> Packed | None:
        packed = pack_blocks()(module, out, columns)
        if packed is None:
            return None
        tensors = dict(packed.tensors)
        tensors["weight_scale_inv"] = tensors["weight_scale_inv"].T
        return Packed(tensors, packed.weight)

    other = checkpoints.llama(tmp_path / "again" / "plain", **WIDE).folder
    stored, _ = quantised(other, BLOCKS, transposed)
    with pytest.raises(WeightError, match=r"the checkpoint holds shape \[2, 3\].*wants \[3, 2\]"):
        logits(stored)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.usefixtures("exact_activations")
@pytest.mark.parametrize("shape", [(1024, 512), (256, 1024)])
def test_ranks_reproduce_the_product(shape: tuple[int, int], size: int) -> None:
    """The second has ranks whose outputs are half a block."""
    packed = pack_blocks()("o_proj", *shape)
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1))
    config = parse_quantization(BLOCKS, {})
    expected = (x.double() @ packed.weight.T).float()
    for product in split_products(config, packed.tensors, x, shape[0], size):
        torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-3)


def test_ranks_that_would_cut_a_group_of_inputs() -> None:
    config = parse_quantization(BLOCKS, {})
    with pytest.raises(ValueError, match=r"groups of 128 inputs.* 0\.\.64 of 256 would cut"):
        split_products(config, {}, torch.ones(1, 256), 128, 4)


def test_other_types_and_nan_are_refused(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "plain", **WIDE).folder
    for name, value, message in (
        ("weight", torch.ones(192, 192, dtype=torch.int8), "holds torch.int8, .*float8_e4m3fn"),
        ("weight", torch.ones(192, 192, dtype=torch.bfloat16), "holds torch.bfloat16"),
        ("weight_scale_inv", torch.full((2, 2), float("nan")), "NaN or infinite"),
        ("weight", torch.full((192, 192), float("nan")).to(torch.float8_e4m3fn), "NaN"),
    ):

        def pack(
            module: str, out: int, columns: int, name: str = name, value: torch.Tensor = value
        ) -> Packed | None:
            packed = pack_blocks()(module, out, columns)
            if packed is None or "o_proj" not in module:
                return packed
            return Packed({**packed.tensors, name: value}, packed.weight)

        stored, dense = quantised(folder, BLOCKS, pack)
        with pytest.raises(WeightError, match=message):
            logits(stored)
        shutil.rmtree(stored)
        shutil.rmtree(dense)


def test_static_scales_of_integers_are_one_only_if_they_are_near() -> None:
    near, apart = torch.tensor([0.1, 0.15]), torch.tensor([0.1, 0.3])
    assert largest(near, Activations("int8", is_static=True)) == near[1]
    assert largest(apart, Activations("fp8", is_static=True)) == apart[1]
    with pytest.raises(ValueError, match=r"from 0\.1 to 0\.3 cannot be one"):
        largest(apart, Activations("int8", is_static=True))


def test_zero_points_belong_to_groups() -> None:
    with pytest.raises(ValueError, match="groups of inputs"):
        WeightFormat("int4", has_zeros=True, has_row_scale=True)
