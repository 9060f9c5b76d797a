"""`quant_method: quark`: every scheme, and which layer has which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from quantised import activations
from quantised.packing import (
    Packed,
    assert_same_model,
    but_the_tower,
    check_experts,
    logits,
    quantised,
    split_products,
)
from quantised.quark_schemes import (
    FP8,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_GROUP,
    FP8_TOKEN,
    INT4_CHANNEL,
    INT4_GROUP,
    MXFP4,
    MXFP4_INPUTS,
    NVFP4,
    UINT4_GROUP,
    Config,
    layer,
    pack_fp8,
    pack_fp8_blocks,
    pack_fp8_float_blocks,
    pack_int4_channel,
    pack_int4_groups,
    pack_mxfp4,
    pack_nvfp4,
    pack_ptpc,
    pack_w4a8,
    quark,
    spec,
)
from quantised.writers import (
    AWQ_ORDER,
    E2M1,
    PLAIN,
    over_groups,
    pack_pairs,
    powers,
)

from atom.config import ConfigError
from atom.model_loader.weights import WeightError
from atom.model_ops.quant.base import Header, QuantConfig
from atom.model_ops.quant.formats.table import parse_quantization
from atom.model_ops.quant.words import unpack_words


@dataclass(frozen=True)
class Row:
    config: Config
    pack: Callable[[int, int], Packed]
    without: tuple[str, ...] = ()

    def packed(self, out: int, columns: int) -> Packed:
        packed = self.pack(out, columns)
        tensors = {k: v for k, v in packed.tensors.items() if k not in self.without}
        return Packed(tensors, packed.weight)

    def parsed(self, packed: Packed, layer: str = "a.o_proj") -> QuantConfig:
        headers = {f"{layer}.{k}": Header(v.dtype, v.shape) for k, v in packed.tensors.items()}
        return parse_quantization(self.config, headers)


STATIC, STATIC_2 = ("input_scale",), ("input_scale_2",)
ROWS = {
    "mxfp4": Row(quark(MXFP4), pack_mxfp4),
    "mxfp4 w4a4": Row(quark([MXFP4], [MXFP4_INPUTS]), pack_mxfp4),
    "fp8": Row(quark(FP8), pack_fp8, STATIC),
    "fp8 static": Row(quark(FP8, FP8), pack_fp8),
    "ptpc": Row(quark(FP8_CHANNEL, FP8_TOKEN), pack_ptpc),
    "fp8 blocks": Row(quark(FP8_BLOCK, FP8_GROUP), pack_fp8_blocks),
    "fp8 float blocks": Row(quark(FP8_BLOCK, FP8_GROUP), pack_fp8_float_blocks),
    "int4 reorder": Row(quark(INT4_GROUP), pack_int4_groups(AWQ_ORDER, True)),
    "int4 order": Row(quark(INT4_GROUP, method="order"), pack_int4_groups(PLAIN, True)),
    "uint4 reorder": Row(quark(UINT4_GROUP), pack_int4_groups(AWQ_ORDER, False)),
    "int4 channel": Row(quark(INT4_CHANNEL), pack_int4_channel),
    "int4 channel order": Row(
        quark(INT4_CHANNEL, method="order"), lambda *sizes: pack_int4_channel(*sizes, PLAIN)
    ),
    "w4a8": Row(quark([FP8, INT4_CHANNEL], {**FP8, "is_dynamic": True}), pack_w4a8),
    "w4a8 one scale": Row(quark([FP8, INT4_CHANNEL], FP8_TOKEN), pack_int4_channel),
    "nvfp4": Row(quark([NVFP4, FP8], [NVFP4, FP8]), pack_nvfp4),
    "nvfp4 weights": Row(quark([NVFP4, FP8]), pack_nvfp4, STATIC_2),
}


@pytest.mark.usefixtures("exact_activations")
@pytest.mark.parametrize("name", ROWS)
def test_a_model(tmp_path: Path, name: str) -> None:
    """Its head is quantised, too."""
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder
    config = {**ROWS[name].config, "exclude": []}
    stored, dense = quantised(folder, config, lambda _, *sizes: ROWS[name].packed(*sizes))
    assert_same_model(stored, dense)


@pytest.mark.usefixtures("exact_activations")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ROWS)
def test_ranks_have_the_weights(name: str, size: int) -> None:
    """Exactly: the inputs are unit vectors. Outputs of half a block of 128, too."""
    packed = ROWS[name].packed(256, 512)
    config = ROWS[name].parsed(packed)
    expected = packed.weight.T.float()
    for product in split_products(config, packed.tensors, torch.eye(512), 256, size):
        torch.testing.assert_close(product, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", ROWS)
def test_experts(name: str) -> None:
    config = ROWS[name].parsed(ROWS[name].packed(32, 64), "m.experts.0.gate_proj")
    check_experts(config, ROWS[name].packed)


ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mxfp4 w4a4": activations.mxfp4,
    "fp8 static": lambda x: activations.fp8_static(x, 0.02),
    "ptpc": activations.fp8_tokens,
    "fp8 blocks": lambda x: activations.fp8_groups(x, 128),
    "nvfp4": lambda x: activations.nvfp4(x, 0.01),
    "w4a8": activations.fp8_tokens,
}


@pytest.mark.parametrize("name", ROUNDED)
def test_inputs_are_rounded(name: str) -> None:
    packed = ROWS[name].packed(64, 256)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [0.1, 1, 3, 20, 0.01]
    ).view(5, 1)
    rounded = ROUNDED[name](x)
    assert (rounded - x).abs().max() > 0.01
    product, _ = split_products(ROWS[name].parsed(packed), packed.tensors, x, 64, 1)
    error = (product.double() - rounded @ packed.weight.T).abs()
    # Sums in float32, whose terms may cancel.
    assert (error <= 2e-6 * (rounded.abs() @ packed.weight.abs().T)).all()


@pytest.mark.usefixtures("exact_activations")
def test_kimi_with_attention_in_fp8(tmp_path: Path) -> None:
    """MXFP4 but for the attention; groups of 32 inputs are cut short at 48 and 24."""
    folder = checkpoints.kimi_k25(tmp_path / "plain", num_hidden_layers=2).folder

    def pack(module: str, out: int, columns: int) -> Packed | None:
        if not module.startswith("language_model") or module.endswith(("lm_head", "mlp.gate")):
            return None
        return (pack_ptpc if ".self_attn." in module else pack_mxfp4)(out, columns)

    config = quark(
        MXFP4,
        MXFP4_INPUTS,
        layer_quant_config={"*self_attn*": layer(FP8_CHANNEL, FP8_TOKEN)},
        exclude=["language_model.lm_head", "re:vision_tower.*", "mm_projector.*", "*.mlp.gate"],
    )
    assert_same_model(*quantised(folder, config, pack))


@pytest.mark.usefixtures("exact_activations")
def test_kimi_with_plain_attention(tmp_path: Path) -> None:
    folder = checkpoints.kimi_k25(tmp_path / "plain", num_hidden_layers=2).folder

    def pack(module: str, out: int, columns: int) -> Packed | None:
        return (
            pack_mxfp4(out, columns) if ".mlp." in module and ".gate." not in module + "." else None
        )

    exclude = ["lm_head", r"re:.*self_attn.*", "vision_tower.*", "mm_projector", "mlp.gate"]
    assert_same_model(*quantised(folder, quark(MXFP4, exclude=exclude), but_the_tower(pack)))


def test_the_smallest_and_the_largest_exponent() -> None:
    codes = torch.arange(16).repeat(8, 4)
    codes[:, 32:] = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11]).repeat(4)
    scale = torch.tensor([0, 254], dtype=torch.uint8).repeat(8, 1)
    weight = E2M1[codes] * over_groups(powers(scale), 32, 64)
    tensors = {"weight": pack_pairs(codes), "weight_scale": scale}
    config = parse_quantization(quark(MXFP4), {})
    product, _ = split_products(config, tensors, torch.eye(64), 8, 1)
    assert torch.equal(product, weight.T.float())
    tensors["weight_scale"] = scale.clone().fill_(255)
    with pytest.raises(ValueError, match="16 of 16 scales are NaN"):
        split_products(config, tensors, torch.eye(64), 8, 1)


def test_known_words() -> None:
    for word, reordered in ((0x75316420, True), (0x76543210, False)):
        words = torch.tensor([word], dtype=torch.int32)
        assert unpack_words(words, reordered).tolist() == list(range(8))
        assert unpack_words(words, not reordered).tolist() != list(range(8))


@pytest.mark.parametrize(("name", "other"), [("int4 reorder", "order"), ("int4 order", "reorder")])
def test_the_wrong_order_differs(name: str, other: str) -> None:
    packed = ROWS[name].packed(64, 64)
    config = parse_quantization(quark(INT4_GROUP, method=other), {})
    product, _ = split_products(config, packed.tensors, torch.eye(64), 64, 1)
    assert (product - packed.weight.T).abs().max() > 0.1


def schemes(config: Config, *names: str, **kind: Any) -> list[str]:
    parsed = parse_quantization(config, {})
    methods = [parsed.method_for(name, **kind) for name in names]
    return [str(method.format) if method else "" for method in methods]


def test_layer_goes_before_type_and_type_before_global() -> None:
    config = quark(
        MXFP4,
        layer_type_quant_config={"<class 'torch.nn.modules.linear.Linear'>": layer(FP8_CHANNEL)},
        layer_quant_config={"*.k_proj": layer(INT4_CHANNEL), "v_proj": layer(None)},
    )
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    assert schemes(config, *names) == ["fp8 channel weight-only", "int4 channel weight-only", ""]
    del config["layer_type_quant_config"]
    assert schemes(config, names[0]) == ["fp4 group 32 e8m0 weight-only"]
    with pytest.raises(ConfigError, match=r"q_proj is stored as fp4 .*k_proj as int4"):
        parse_quantization(config, {}).method_for("model.layers.0.self_attn.qkv_proj", names)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("model.layers.1.mlp.gate_proj", "1.mlp.gate_proj"),
        ("model.layers.1.mlp", "1.mlp.gate_proj"),
        ("layers.1", "1.mlp.gate_proj"),
        (r"re:model.*\.1\.mlp", "1.mlp.gate_proj"),
        ("re:layers", ""),
        ("model.layers.1*", "1.mlp.gate_proj 11.mlp.gate_proj"),
        ("*layers.11.*", "11.mlp.gate_proj"),
        (r"layers\.\d\.mlp", "1.mlp.gate_proj"),
        ("mlp.*", "1.mlp.gate_proj 11.mlp.gate_proj"),
        ("*.mlp.gate", ""),
        ("model.layers.1.mlp.gate", ""),
        ("*lm_head", ""),
        (".*1.mlp.*", "1.mlp.gate_proj 11.mlp.gate_proj"),
        ("model.*.1.*.gate_proj", "1.mlp.gate_proj"),
        ("layers.*.gate_proj", "1.mlp.gate_proj 11.mlp.gate_proj"),
    ],
)
def test_exclusions(entry: str, expected: str) -> None:
    parsed = parse_quantization(quark(MXFP4, exclude=[entry]), {})
    names = ["1.mlp.gate_proj", "11.mlp.gate_proj"]
    found = [name for name in names if parsed.method_for(f"model.layers.{name}") is None]
    assert " ".join(found) == expected


def test_one_listed_expert_stands_for_all() -> None:
    config = quark(MXFP4, exclude=["model.layers.1.mlp.experts.0.gate_proj"])
    parts = [f"model.layers.1.mlp.experts.{i}.gate_proj" for i in range(2)]
    assert schemes(config, "model.layers.1.mlp.experts", parts=parts, kind="experts") == [""]


def test_zero_points_of_symmetric_weights() -> None:
    for name in ("int4 reorder", "int4 channel"):
        packed = ROWS[name].packed(32, 32)
        tensors = dict(packed.tensors)
        del tensors["weight_zero_point"]
        config = ROWS[name].parsed(packed)
        product, _ = split_products(config, tensors, torch.eye(32), 32, 1)
        assert torch.equal(product, packed.weight.T.float())
        tensors["weight_zero_point"] = packed.tensors["weight_zero_point"].clone()
        tensors["weight_zero_point"].view(-1)[1] = 3
        with pytest.raises(ValueError, match=r"1 of \d+ zero points are not 0"):
            split_products(config, tensors, torch.eye(32), 32, 1)


def test_scales_of_other_shapes() -> None:
    shape = Header(torch.float16, (32, 4))
    config = parse_quantization(quark(INT4_CHANNEL), {"a.weight_scale": shape})
    with pytest.raises(ConfigError, match=r"shape .*'weight_scale': \[32, 4\]"):
        config.method_for("a")


def test_the_scale_of_a_cached_output_is_none_of_the_product(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder
    cached = {f"*{part}_proj": layer(FP8, FP8, output_tensors=FP8) for part in "kv"}

    def pack(module: str, out: int, columns: int) -> Packed | None:
        packed = pack_fp8(out, columns)
        if module == "lm_head":
            return None
        scale = {"output_scale": torch.tensor(0.5)} if module[-6:] in cached_names else {}
        return Packed({**packed.tensors, **scale}, packed.weight)

    cached_names = ("k_proj", "v_proj")
    stored, _ = quantised(folder, quark(FP8, FP8, layer_quant_config=cached), pack)
    assert logits(stored).isfinite().all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (quark(spec("int8", "per_channel")), "a is stored as int8 per_channel, which"),
        (quark({**INT4_CHANNEL, "symmetric": False}), "a is stored as int4 per_channel, which"),
        (quark({**MXFP4, "scale_format": "float32"}), "fp4 per_group 32, which"),
        (quark({**MXFP4, "ch_axis": 0}), r"global_quant_config.weight.ch_axis=0 of fp4"),
        (quark(MXFP4, spec("int8", "per_tensor")), r"input_tensors of int8 per_tensor \(static"),
        (quark({**MXFP4, "mx_element_dtype": "fp4"}), "mx_element_dtype='fp4'"),
        (
            quark(MXFP4, {**MXFP4, "is_dynamic": True, "scale_calculation_mode": "floor"}),
            "scale_calculation_mode='floor' is not supported",
        ),
        (quark("fp8"), "weight='fp8' is no specification"),
        (quark(None, FP8), "quantises inputs, but not weights"),
        (quark(FP8, global_quant_config=layer(FP8, output_tensors=FP8)), "output_tensors is not"),
        (quark(FP8, global_quant_config=layer(FP8, bias=FP8)), "global_quant_config.bias is not"),
        (quark(FP8, global_quant_config=layer(FP8, pre_scale=2)), "global_quant_config.pre_scale"),
        (quark(FP8, softmax_quant_spec=FP8), "softmax_quant_spec"),
        (quark(FP8, algo_config=[{"name": "rotation", "r1": True, "r4": True}]), "r4=True"),
        (quark(FP8, method="other"), "pack_method='other'"),
        (quark(FP8, exclude=["re:("]), r"exclude holds 're:\('"),
        (quark(FP8, exclude=["(lm_head"]), r"exclude holds '\(lm_head'"),
    ],
)
def test_refusals(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_quantization(config, {}).method_for("a")


def test_ranks_that_would_cut_a_group_or_a_word() -> None:
    with pytest.raises(ValueError, match=r"groups of 32 inputs.* 0\.\.16 of 32 would cut"):
        split_products(parse_quantization(quark(MXFP4), {}), {}, torch.ones(1, 32), 64, 2)
    with pytest.raises(ValueError, match=r"groups of 8 outputs.* 0\.\.4 of 8 would cut"):
        split_products(parse_quantization(quark(INT4_GROUP), {}), {}, torch.ones(1, 64), 8, 2)


def test_a_missing_scale(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder

    def pack(module: str, out: int, columns: int) -> Packed | None:
        packed = pack_int4_channel(out, columns)
        return (
            None
            if module == "lm_head"
            else Packed({"weight": packed.tensors["weight"]}, packed.weight)
        )

    stored, _ = quantised(folder, quark(INT4_CHANNEL), pack)
    with pytest.raises(WeightError, match=r"missing tensors .*weight_scale"):
        logits(stored)
