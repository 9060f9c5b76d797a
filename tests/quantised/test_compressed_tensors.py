"""`quant_method: compressed-tensors`: the numbers of its formats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import checkpoints
from models.harness import load_model
from quantised import activations
from quantised.compressed import (
    FORMATS,
    FP8_TOKENS,
    INT4,
    NVFP4,
    bytes_of,
    config,
    floats,
    integers,
    ints,
    pack_mx,
    pack_nvfp4,
    seeded,
)
from quantised.packing import (
    Pack,
    Packed,
    assert_same_model,
    layer_context,
    logits,
    quantised,
    split_products,
)

from atom.config import ConfigError
from atom.distributed.parallel_state import ParallelGroup
from atom.model_loader.weights import WeightError
from atom.model_ops.moe import FusedMoE
from atom.model_ops.quant.base import Header
from atom.model_ops.quant.formats.table import parse_quantization

Change = Callable[[torch.Tensor], torch.Tensor | None]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("exact_activations")
def test_weights(tmp_path: Path, name: str) -> None:
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder
    assert_same_model(*quantised(folder, *FORMATS[name]))


OF_EXPERTS = ["int4", "int4 zeros", "nvfp4 inputs", "mxfp4"]
KIMI_IGNORES = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
]


def of_experts(pack: Pack) -> Pack:
    return lambda module, out, columns: (
        pack(module, out, columns) if ".experts." in module else None
    )


@pytest.mark.parametrize("name", OF_EXPERTS)
@pytest.mark.usefixtures("exact_activations")
def test_experts_of_kimi(tmp_path: Path, name: str) -> None:
    """Only routed experts are quantised; `lm_head` in `ignore` is not the head's whole name."""
    settings, pack = FORMATS[name]
    folder = checkpoints.kimi_k25(tmp_path / "plain", num_hidden_layers=2).folder
    settings = {**settings, "ignore": KIMI_IGNORES}
    assert_same_model(*quantised(folder, settings, of_experts(pack)))


FP8_GROUPS = floats(8, "group", 128, dynamic=True)
MXFP8 = floats(8, "group", 32, dynamic=True)
ARITHMETIC: dict[str, tuple[dict[str, Any], Pack, Callable[[torch.Tensor], torch.Tensor]]] = {
    "int8 tokens": (*FORMATS["w8a8"], activations.int8_tokens),
    "int8 static": (
        config("int-quantized", ints(8, None), {"num_bits": 8, "strategy": "tensor"}),
        bytes_of("int8", 1, 0, static=True),
        lambda x: activations.int8_static(x, 0.02),
    ),
    "fp8 tokens": (*FORMATS["fp8 channel"], activations.fp8_tokens),
    "fp8 static": (
        config("float-quantized", floats(8, "tensor"), floats(8, "tensor", dynamic=False)),
        bytes_of("fp8", 0, 0, static=True),
        lambda x: activations.fp8_static(x, 0.02),
    ),
    "fp8 groups": (*FORMATS["fp8 block"], lambda x: activations.fp8_groups(x, 128)),
    "int4 fp8": (
        config("pack-quantized", ints(4, 32), FP8_TOKENS),
        integers(4, 32),
        activations.fp8_tokens,
    ),
    "nvfp4": (*FORMATS["nvfp4 inputs"], lambda x: activations.nvfp4(x, 1 / 800)),
    "mxfp4": (
        config(
            "mxfp4-pack-quantized", floats(4, "group", 32), floats(4, "group", 32, dynamic=True)
        ),
        pack_mx(),
        activations.mxfp4,
    ),
    "mxfp8": (
        config("mxfp8-quantized", floats(8, "group", 32), MXFP8),
        pack_mx(8),
        lambda x: activations.fp8_groups(x, 32, powers=True),
    ),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_quantised_inputs(name: str) -> None:
    settings, pack, quantise = ARITHMETIC[name]
    packed = pack("a.o_proj", 64, 256)
    assert packed is not None
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    found, _ = split_products(parse_quantization(settings, {}), packed.tensors, x, 64, 1)
    expected = quantise(x) @ packed.weight.T
    exact = x.double() @ packed.weight.T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert (expected - exact).abs().max() > 1e-3


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("exact_activations")
def test_ranks_reproduce_the_product(name: str, size: int) -> None:
    settings, pack = FORMATS[name]
    packed = pack("o_proj", 64, 128)
    assert packed is not None
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    expected = (x.double() @ packed.weight.T).float()
    config_ = parse_quantization(settings, {})
    for found in split_products(config_, packed.tensors, x, 64, size):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OF_EXPERTS)
@pytest.mark.usefixtures("exact_activations")
def test_ranks_split_experts(name: str) -> None:
    """Each has a quarter of every expert's intermediate outputs."""
    settings, pack = FORMATS[name]
    inter, hidden = 128, 64
    generator = torch.Generator().manual_seed(1)
    x, shares = torch.randn(3, hidden, generator=generator), torch.rand(3, 2, generator=generator)
    ids = torch.tensor([[0, 1], [1, 0], [0, 1]])
    parsed = parse_quantization(settings, {})
    ranks = [
        FusedMoE(2, 2, hidden, inter, layer_context(parsed, ParallelGroup(rank, 4)), "experts")
        for rank in range(4)
    ]
    dense = {}
    for e, part in product(range(2), ("gate_proj", "up_proj", "down_proj")):
        shape = (hidden, inter) if part == "down_proj" else (inter, hidden)
        packed = pack(f"{e}.{part}", *shape)
        assert packed is not None
        dense[e, part] = packed.weight.float()
        for moe in ranks:
            for tensor, values in packed.tensors.items():
                placed = moe.place_weight(f"{e}.{part}.{tensor}")
                assert placed is not None
                moe.load_weight(placed[0], values, placed[1])
    for moe in ranks:
        moe.process_after_loading()
    found = torch.stack([moe(x, shares, ids) for moe in ranks]).sum(dim=0)
    expected = torch.zeros_like(x)
    for t, k in product(range(3), range(2)):
        e = int(ids[t, k])
        between = F.silu(dense[e, "gate_proj"] @ x[t]) * (dense[e, "up_proj"] @ x[t])
        expected[t] += shares[t, k] * (dense[e, "down_proj"] @ between)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_ranks_that_would_cut_words_or_groups() -> None:
    split = parse_quantization(INT4, {})
    with pytest.raises(ValueError, match=r"weight_scale .*groups of 32 inputs, .* 0\.\.16 of 64"):
        split_products(split, {}, torch.ones(1, 64), 64, 4)
    zeros = parse_quantization(FORMATS["int4 zeros"][0], {})
    with pytest.raises(ValueError, match="weight_zero_point is stored in groups of 8 outputs"):
        split_products(zeros, {}, torch.ones(1, 128), 16, 4)


@pytest.mark.parametrize("name", ["int4 zeros", "int8 zeros"])
def test_one_word_has_the_zero_points_of_all_outputs(name: str) -> None:
    settings, pack = FORMATS[name]
    packed = pack("a.o_proj", 4, 64)
    assert packed is not None
    config_ = parse_quantization(settings, {})
    found, _ = split_products(config_, packed.tensors, torch.eye(64), 4, 1)
    assert torch.equal(found, packed.weight.T.float())


def shuffled(size: int, columns: int) -> torch.Tensor:
    """Groups of `size` inputs, in no order."""
    return torch.randperm(columns, generator=seeded("order", columns)) // size


def shuffled_halves(columns: int) -> torch.Tensor:
    half = shuffled(32, columns // 2)
    return torch.cat((half, half.flip(0) + columns // 64))


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_reordered_inputs(symmetric: bool) -> None:
    """Ranks that split the inputs refuse them, unless each has whole groups."""
    settings = config("pack-quantized", {**ints(4, 32, symmetric), "actorder": "group"})
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    for index, size in ((partial(shuffled, 32), 1), (shuffled_halves, 2)):
        packed = integers(4, 32, symmetric, index)("a.o_proj", 64, 128)
        assert packed is not None
        headers = {f"a.o_proj.{k}": Header(v.dtype, v.shape) for k, v in packed.tensors.items()}
        parsed = parse_quantization(settings, headers)
        expected = (x.double() @ packed.weight.T).float()
        for found in split_products(parsed, packed.tensors, x, 64, size):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match=r"weight_g_idx does not put 32 .* split over ranks"):
            split_products(parsed, packed.tensors, x, 64, 4)


def test_reordered_inputs_of_a_whole_model(tmp_path: Path) -> None:
    """Parts of one product have one order, which the checkpoint must have if it says so."""
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder
    settings = config("pack-quantized", {**ints(4, 16), "actorder": "group"})
    assert_same_model(*quantised(folder, settings, integers(4, 16, index=partial(shuffled, 16))))
    other = checkpoints.llama(tmp_path / "again" / "plain", num_hidden_layers=1).folder
    stored, _ = quantised(other, settings, integers(4, 16))
    with pytest.raises(WeightError, match=r"missing .*weight_g_idx"):
        logits(stored)


def test_orders_that_differ_within_a_product() -> None:
    """And groups that there are not, and experts, whose orders differ."""
    weights = {**ints(4, 16), "actorder": "group"}
    headers = {
        "a.gate_proj.weight_scale": Header(torch.bfloat16, (8, 2)),
        "a.gate_proj.weight_g_idx": Header(torch.int32, (32,)),
    }
    parsed = parse_quantization(config("pack-quantized", weights), headers)
    names = "a.gate_proj", "a.up_proj"
    method = parsed.method_for("a.gate_up_proj", names)
    assert method is not None
    packed = integers(4, 16)("a", 16, 32)
    assert packed is not None
    for index, message in (
        (torch.stack((torch.arange(32) // 16, torch.arange(32) % 2)), "differs between matrices"),
        ((torch.arange(32) // 8).expand(2, -1), "groups 0 to 3 of 2"),
    ):
        tensors = {**packed.tensors, "weight_g_idx": index.int()}
        with pytest.raises(ValueError, match=message):
            method.convert(tensors, (8, 8), 32)
    with pytest.raises(ConfigError, match="weight_g_idx of experts"):
        parsed.method_for("a.experts", names, "experts")


def test_several_formats_in_one_checkpoint(tmp_path: Path) -> None:
    """`mixed-precision`: each group has its own; the head is one of them. The cache has scales."""
    attention, mlp, head = (
        {"targets": [target], "format": FORMATS[name][0]["format"]}
        | {"weights": FORMATS[name][0]["config_groups"]["group_0"]["weights"]}
        for target, name in (
            ("re:.*self_attn", "int8 channel"),
            ("Linear", "nvfp4"),
            ("lm_head", "int4 zeros"),
        )
    )
    settings = config("mixed-precision", {}, compression_ratio=1.5, ignore=[])
    settings["config_groups"] = {"a": mlp, "b": attention, "c": head}
    settings["kv_cache_scheme"] = floats(8, "tensor", dynamic=False)

    def pack(module: str, out: int, columns: int) -> Packed | None:
        name = "int8 channel" if "attn" in module else "nvfp4"
        if module == "lm_head":
            return FORMATS["int4 zeros"][1]("head", out, columns)
        packed = FORMATS[name][1](module, out, columns)
        if packed is None or "v_proj" not in module:
            return packed
        return Packed({**packed.tensors, "v_scale": torch.tensor([0.5])}, packed.weight)

    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder
    stored, dense = quantised(folder, settings, pack)
    checkpoints.edit_config(stored, quantization_config=None, compression_config=settings)
    assert_same_model(stored, dense)
    scale = load_model(stored, max_model_len=16).get_buffer(
        "model.layers.0.self_attn.attn.kv_scale.given"
    )
    assert scale.tolist() == [0.0, 0.5]


def damaged(
    pack: Pack, name: str, change: Change, module: str, out: int, columns: int
) -> Packed | None:
    """One tensor of `o_proj` is another, or missing."""
    packed = pack(module, out, columns)
    if packed is None or "o_proj" not in module:
        return packed
    tensors = {**packed.tensors, name: change(packed.tensors[name])}
    return Packed({k: v for k, v in tensors.items() if v is not None}, packed.weight)


def test_damaged_checkpoints(tmp_path: Path) -> None:
    """A tensor that is missing, of another shape or type, or a file that ends early."""
    changes: dict[str, tuple[Change, str]] = {
        "weight_scale": (lambda t: t.T, r"holds shape \[2, 48\].*wants \[48, 2\]"),
        "weight_packed": (lambda t: t.to(torch.int64), "holds torch.int64"),
        "weight_shape": (lambda t: t.flip(0) + 1, r"says shape \[49, 49\].* wants \[48, 48\]"),
        "weight_zero_point": (lambda t: None, r"missing .*o_proj.weight_zero_point"),
    }
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder
    settings, pack = FORMATS["int4 zeros"]
    for i, (name, (change, message)) in enumerate(changes.items()):
        (tmp_path / str(i)).mkdir()
        folder = folder.rename(tmp_path / str(i) / "plain")
        stored, _ = quantised(folder, settings, partial(damaged, pack, name, change))
        with pytest.raises(WeightError, match=message):
            logits(stored)
    file = stored / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightError, match="damaged or incomplete"):
        logits(stored)


def test_a_divisor_of_zero_is_refused() -> None:
    packed = pack_nvfp4()("o_proj", 16, 32)
    assert packed is not None
    tensors = {**packed.tensors, "weight_global_scale": torch.zeros(1)}
    with pytest.raises(ValueError, match="weight_global_scale divides, and is 0"):
        split_products(parse_quantization(NVFP4, {}), tensors, torch.ones(1, 32), 16, 1)
