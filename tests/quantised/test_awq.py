"""`quant_method: awq`: four bits, packed along the outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from quantised.packing import Packed, assert_same_model, logits, quantised, split_products
from quantised.writers import AWQ_ORDER, PLAIN, distinct, pack_words, random_codes

from atom.config import ConfigError
from atom.model_loader.weights import WeightError
from atom.model_ops.quant.base import Header
from atom.model_ops.quant.formats.table import parse_quantization

CONFIG: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 16,
    "zero_point": True,
    "version": "gemm",
}


def pack(
    out: int,
    columns: int,
    size: int = 16,
    dtype: torch.dtype = torch.float16,
    order: tuple[int, ...] = AWQ_ORDER,
) -> Packed:
    """`size` inputs to a group; zero points are 0 to 15."""
    group = torch.arange(columns) // size
    groups = int(group[-1]) + 1
    codes, zeros = random_codes(columns, out), random_codes(groups, out)
    scale = distinct(groups, out)
    tensors = {
        "qweight": pack_words(codes, order),
        "qzeros": pack_words(zeros, order),
        "scales": scale.to(dtype),
    }
    weight = (codes - zeros[group]).double() * scale[group]
    return Packed(tensors, weight.T.contiguous())


def pack_model(module: str, out: int, columns: int) -> Packed | None:
    return None if module == "lm_head" else pack(out, columns)


@pytest.mark.parametrize("names", [{}, {"w_bit": 4, "q_group_size": 16}])
def test_a_model(tmp_path: Path, names: dict[str, int]) -> None:
    """Also with AutoAWQ's own names of the keys."""
    config: dict[str, Any] = dict(CONFIG)
    if names:
        config = {"quant_method": "awq", "version": "GEMM", **names}
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder
    assert_same_model(*quantised(folder, config, pack_model))


def test_experts(tmp_path: Path) -> None:
    """The list means the router, but the word occurs in `gate_proj`, too."""
    fields = {"num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    folder = checkpoints.deepseek_v3(tmp_path / "plain", **fields).folder

    def pack_mlps(module: str, out: int, columns: int) -> Packed | None:
        return pack(out, columns) if ".mlp." in module and module[-4:] != "gate" else None

    config = {**CONFIG, "modules_to_not_convert": ["gate", "self_attn"]}
    assert_same_model(*quantised(folder, config, pack_mlps))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("size", [16, -1])
def test_ranks_have_the_weights(size: int, ranks: int, dtype: torch.dtype) -> None:
    packed = pack(64, 320, 320 if size == -1 else size, dtype)
    header = {"a.o_proj.scales": Header(dtype, (1, 64))}
    config = parse_quantization({**CONFIG, "group_size": size}, header)
    for product in split_products(config, packed.tensors, torch.eye(320), 64, ranks):
        assert torch.equal(product, packed.weight.T.float())


def test_scales_keep_their_type() -> None:
    packed = pack(16, 32)
    scales = packed.tensors["scales"] + 2**-11  # of no bfloat16
    tensors = {**packed.tensors, "scales": scales}
    weight = packed.weight / distinct(2, 16)[torch.arange(32) // 16].T
    weight = weight * scales.double()[torch.arange(32) // 16].T
    config = parse_quantization(CONFIG, {"a.o_proj.scales": Header(torch.float16, (2, 16))})
    product, _ = split_products(config, tensors, torch.eye(32), 16, 1)
    torch.testing.assert_close(product.double(), weight.T, rtol=1e-6, atol=1e-6)


def test_the_plain_order_differs() -> None:
    packed = pack(32, 32, order=PLAIN)
    config = parse_quantization(CONFIG, {})
    product, _ = split_products(config, packed.tensors, torch.eye(32), 32, 1)
    assert (product - packed.weight.T).abs().max() > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "AWQ with bits=3 is not supported, only 4"),
        ({"version": "gemv"}, "version='gemv' is not supported; supported: 'gemm'"),
        ({"version": "gemv_fast"}, "version='gemv_fast'"),
        ({"format": "gemv"}, "format='gemv'"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"group_size": 10**21}, "group_size=10+ is no size from 1 to 65536"),
        ({"zero_point": False}, "zero_point=False"),
        ({"group_size": 0}, "group_size=0 is no size from 1 to 65536"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_quantization({**CONFIG, **change}, {})


def test_a_head_is_quantised_only_if_it_says_so() -> None:
    for says in (False, True):
        config = parse_quantization({**CONFIG, "lm_head": says}, {})
        assert (config.method_for("lm_head", kind="head") is not None) == says


def test_a_scale_that_is_transposed(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder

    def transposed(module: str, out: int, columns: int) -> Packed | None:
        packed = pack_model(module, out, columns)
        if packed is None or "down_proj" not in module:
            return packed
        return Packed({**packed.tensors, "scales": packed.tensors["scales"].T}, packed.weight)

    stored, _ = quantised(folder, CONFIG, transposed)
    with pytest.raises(WeightError, match=r"holds shape \[48, 4\], the model wants \[4, 48\]"):
        logits(stored)
