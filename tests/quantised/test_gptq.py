"""`quant_method: gptq`: 4 and 8 bits, packed along the inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from quantised.packing import (
    Packed,
    assert_same_model,
    check_experts,
    layer_context,
    logits,
    quantised,
    split_products,
)
from quantised.writers import AWQ_ORDER, PLAIN, distinct, pack_words, random_codes

from atom.config import ConfigError
from atom.distributed.parallel_state import SINGLE
from atom.model_loader.errors import WeightError
from atom.model_ops.linear import ColumnParallelLinear
from atom.model_ops.quant.base import Header
from atom.model_ops.quant.formats.table import parse_quantization

Config = dict[str, Any]
CONFIG: Config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True}
BYTES = (0, 1, 2, 3)


def pack(
    out: int, columns: int, config: Config, shuffle: bool = False, order: Any = None
) -> Packed:
    """Zero points are 1 to 16 in v1, so that 0 to 15 are stored, and 0 to 15 in v2."""
    bits, size = config["bits"], config["group_size"]
    order = order or (PLAIN if bits == 4 else BYTES)
    group = torch.arange(columns) // (columns if size == -1 else size)
    if shuffle:
        group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    groups = int(group.max()) + 1
    is_v1 = config.get("checkpoint_format", "gptq") == "gptq"
    if config["sym"]:
        zeros = torch.full((groups, out), 1 << (bits - 1))
    else:
        zeros = random_codes(groups, out, 1 << bits) + is_v1
        zeros = zeros.clamp(max=255)  # 8 bits cannot store 256
    codes, scale = random_codes(columns, out, 1 << bits), distinct(groups, out) * 8 / (1 << bits)
    tensors = {
        "qweight": pack_words(codes.T, order).T,
        "qzeros": pack_words(zeros - int(is_v1), order),
        "scales": scale.half(),
        "g_idx": group.to(torch.int32),
    }
    weight = (codes - zeros[group]).double() * scale[group]
    return Packed(tensors, weight.T.contiguous())


def parsed(config: Config, dtype: torch.dtype = torch.float16) -> Any:
    return parse_quantization(config, {"a.o_proj.scales": Header(dtype, (1, 1))})


VARIANTS: dict[str, Config] = {
    "v1 sym": {},
    "v1 asym": {"sym": False},
    "v2 asym": {"sym": False, "checkpoint_format": "gptq_v2"},
    "v2 sym": {"checkpoint_format": "gptq_v2"},
    "8 bits sym": {"bits": 8},
    "8 bits asym": {"bits": 8, "sym": False},
    "whole rows sym": {"group_size": -1},
    "whole rows asym": {"group_size": -1, "sym": False},
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_have_the_weights(name: str, ranks: int) -> None:
    config = {**CONFIG, **VARIANTS[name]}
    packed = pack(64, 320, config)
    for product in split_products(parsed(config), packed.tensors, torch.eye(320), 64, ranks):
        assert torch.equal(product, packed.weight.T.float())


@pytest.mark.parametrize("name", ["v1 sym", "v1 asym", "8 bits asym", "whole rows asym"])
def test_a_model(tmp_path: Path, name: str) -> None:
    config = {**CONFIG, **VARIANTS[name]}
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder

    def pack_model(module: str, out: int, columns: int) -> Packed | None:
        return None if module == "lm_head" else pack(out, columns, config)

    assert_same_model(*quantised(folder, config, pack_model))


@pytest.mark.parametrize("name", VARIANTS)
def test_experts(name: str) -> None:
    config = {**CONFIG, **VARIANTS[name]}
    check_experts(parsed(config), lambda out, columns: pack(out, columns, config))


def test_inputs_in_another_order(tmp_path: Path) -> None:
    config = {**CONFIG, "desc_act": True, "sym": False}
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder

    def pack_model(module: str, out: int, columns: int) -> Packed | None:
        return None if module == "lm_head" else pack(out, columns, config, shuffle=True)

    assert_same_model(*quantised(folder, config, pack_model))


@pytest.mark.parametrize("bits", [4, 8])
def test_ranks_and_the_order_of_inputs(bits: int) -> None:
    """Outputs can be split; inputs only in groups that are each of one rank."""
    config = {**CONFIG, "bits": bits, "desc_act": True}
    packed = pack(64, 128, config, shuffle=True)
    for product in split_products(parsed(config), packed.tensors, torch.eye(128), 64, 1):
        assert torch.equal(product, packed.weight.T.float())
    message = r"this rank's 64 inputs into its 4 groups of 16: .*desc_act.*use one rank"
    with pytest.raises(ValueError, match=message):
        split_products(parsed(config), packed.tensors, torch.eye(128), 64, 2)
    halves = torch.arange(128) // 64 * 4
    inside = halves + torch.arange(128) % 4
    tensors = {**packed.tensors, "g_idx": inside.to(torch.int32)}
    alone, _ = split_products(parsed(config), tensors, torch.eye(128), 64, 1)
    for product in split_products(parsed(config), tensors, torch.eye(128), 64, 2):
        assert torch.equal(product, alone)


def test_groups_of_other_ranks_are_not_taken_for_own_ones() -> None:
    """Rank 0 has the inputs of groups 4 to 7, rank 1 those of 0 to 3."""
    config = {**CONFIG, "desc_act": True}
    packed = pack(64, 128, config)
    g_idx = (torch.arange(128) // 16 + 4) % 8
    tensors = {**packed.tensors, "g_idx": g_idx.to(torch.int32)}
    with pytest.raises(ValueError, match="use one rank"):
        split_products(parsed(config), tensors, torch.eye(128), 64, 2)


def test_parts_with_different_orders_are_refused(tmp_path: Path) -> None:
    config = {**CONFIG, "desc_act": True}
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder

    def pack_model(module: str, out: int, columns: int) -> Packed | None:
        return None if module == "lm_head" else pack(out, columns, config, "k_proj" in module)

    stored, dense = quantised(folder, config, pack_model)
    with pytest.raises(ValueError, match=r"qkv_proj: the 3 matrices .* different orders \(g_idx\)"):
        assert_same_model(stored, dense)


def test_symmetric_weights_need_no_zero_points() -> None:
    for variant in ("v1 sym", "8 bits sym", "v2 sym"):
        config = {**CONFIG, **VARIANTS[variant]}
        packed = pack(32, 64, config)
        tensors = {name: packed.tensors[name] for name in ("qweight", "scales")}
        product, _ = split_products(parsed(config), tensors, torch.eye(64), 32, 1)
        assert torch.equal(product, packed.weight.T.float())


def test_zero_points_of_the_other_version() -> None:
    packed = pack(32, 64, {**CONFIG, "checkpoint_format": "gptq_v2"})
    with pytest.raises(ValueError, match=r"zero points are 9 to 9, .* makes them 8"):
        split_products(parsed(CONFIG), packed.tensors, torch.eye(64), 32, 1)
    config = {**CONFIG, "bits": 8, "sym": False}
    packed = pack(32, 64, config)
    tensors = {**packed.tensors, "qzeros": torch.full((4, 8), -1, dtype=torch.int32)}
    with pytest.raises(ValueError, match="stored as 255, which stands for 256"):
        split_products(parsed(config), tensors, torch.eye(64), 32, 1)


def test_the_version_may_be_called_format() -> None:
    config = {**CONFIG, "sym": False}
    packed = pack(32, 64, {**config, "checkpoint_format": "gptq_v2"})
    stated = parsed({**config, "format": "gptq_v2"})
    product, _ = split_products(stated, packed.tensors, torch.eye(64), 32, 1)
    assert torch.equal(product, packed.weight.T.float())


def with_bias(packed: Packed, value: float = 0) -> Packed:
    bias = torch.full((packed.weight.shape[0],), value, dtype=torch.float16)
    return Packed({**packed.tensors, "bias": bias}, packed.weight)


def test_biases_of_zeros_are_dropped(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder

    def pack_model(module: str, out: int, columns: int) -> Packed | None:
        return None if module == "lm_head" else with_bias(pack(out, columns, CONFIG))

    assert_same_model(*quantised(folder, CONFIG, pack_model))
    check_experts(parsed(CONFIG), lambda out, columns: with_bias(pack(out, columns, CONFIG)))


@pytest.mark.parametrize("part", ["k_proj", "down_proj"])
def test_a_bias_that_the_model_lacks(tmp_path: Path, part: str) -> None:
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder

    def pack_model(module: str, out: int, columns: int) -> Packed | None:
        value = 0.5 if part in module else 0
        return None if module == "lm_head" else with_bias(pack(out, columns, CONFIG), value)

    stored, _ = quantised(folder, CONFIG, pack_model)
    with pytest.raises(WeightError, match=rf"{part}\.bias: \d+ of \d+ values are not 0"):
        logits(stored)


def test_a_layer_with_a_bias_keeps_it() -> None:
    layer = ColumnParallelLinear(64, 32, True, layer_context(parsed(CONFIG), SINGLE), "a.o_proj")
    packed = with_bias(pack(32, 64, CONFIG), 0.5)
    for name, tensor in packed.tensors.items():
        layer.load_weight(name, tensor, None)
    layer.process_after_loading()
    assert torch.equal(layer(torch.eye(64)), packed.weight.T.float() + 0.5)


def test_groups_of_64_bits() -> None:
    config = {**CONFIG, "desc_act": True}
    packed = pack(32, 64, config, shuffle=True)
    wide = {**packed.tensors, "g_idx": packed.tensors["g_idx"].long()}
    product, _ = split_products(parsed(config), wide, torch.eye(64), 32, 1)
    assert torch.equal(product, packed.weight.T.float())
    wide["g_idx"] = wide["g_idx"] + (1 << 32)
    with pytest.raises(ValueError, match=r"groups 4294967296 to 4294967299 of inputs"):
        split_products(parsed(config), wide, torch.eye(64), 32, 1)


def test_known_words() -> None:
    """One input of eight to a word; zero points 0x77777777 are 8."""
    tensors = {
        "qweight": torch.full((1, 8), 0x76543210, dtype=torch.int32),
        "qzeros": torch.full((1, 1), 0x77777777, dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    config = parsed({**CONFIG, "group_size": 8})
    product, _ = split_products(config, tensors, torch.eye(8), 8, 1)
    assert torch.equal(product, (torch.arange(8.0) - 8)[:, None].expand(8, 8))


def test_the_order_of_awq_differs() -> None:
    packed = pack(32, 64, CONFIG, order=AWQ_ORDER)
    product, _ = split_products(parsed(CONFIG), packed.tensors, torch.eye(64), 32, 1)
    assert (product - packed.weight.T).abs().max() > 0.1


def test_rules_by_name() -> None:
    rules = {r"-:.*\.1\.": {}, r"+:.*k_proj": {"bits": 8, "group_size": 32}, "model.*v_proj": None}
    config = parse_quantization({**CONFIG, "dynamic": rules}, {})
    names = ["model.0.k_proj", "model.1.k_proj", "model.0.v_proj", "x.model.0.v_proj"]
    found = [config.method_for(name) for name in names]
    assert [method and str(method.format) for method in found] == [
        "int8 group 32 weight-only",
        None,
        "int4 group 16 weight-only",
        "int4 group 16 weight-only",
    ]
    with pytest.raises(ConfigError, match=r"k_proj as 8 bits, group_size 32, symmetric"):
        config.method_for("model.0.qkv_proj", ["model.0.q_proj", "model.0.k_proj"])
    for says in (False, True):
        config = parse_quantization({**CONFIG, "lm_head": says}, {})
        assert (config.method_for("lm_head", kind="head") is not None) == says


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "GPTQ with bits=3 is not supported, only 4 and 8"),
        ({"bits": 2}, "bits=2"),
        ({"dynamic": {"+:a": {"bits": 2}}}, "bits=2"),
        ({"dynamic": {"-:(": {}}}, r"dynamic holds '-:\('"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"format": "marlin"}, "format='marlin'"),
        (
            {"format": "gptq_v2", "checkpoint_format": "gptq"},
            "checkpoint_format='gptq' and format='gptq_v2' differ",
        ),
        ({"group_size": 1_000_000}, "group_size=1000000 is no size from 1 to 65536"),
        ({"is_marlin_format": True}, "is_marlin_format=True"),
        ({"rotation": "hadamard"}, "rotation='hadamard'"),
        ({"pack_dtype": "int64"}, "pack_dtype='int64'"),
        ({"group_size": "all"}, "group_size='all'"),
    ],
)
def test_refusals(change: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_quantization({**CONFIG, **change}, {})
