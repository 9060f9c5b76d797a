"""AMD Quark's configurations, and packers of its schemes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from quantised.packing import Packed
from quantised.writers import (
    AWQ_ORDER,
    E2M1,
    distinct,
    exponents,
    generator,
    over_blocks,
    over_groups,
    pack_pairs,
    pack_words,
    powers,
    random_codes,
)

Config = dict[str, Any]


def spec(dtype: str, qscheme: str, **more: Any) -> Config:
    return {"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "symmetric": True, **more}


def layer(weight: Any, inputs: Any = None, **more: Any) -> Config:
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, **more}


def quark(weight: Any, inputs: Any = None, method: str = "reorder", **more: Any) -> Config:
    return {
        "quant_method": "quark",
        "global_quant_config": layer(weight, inputs),
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"weight_format": "real_quantized", "pack_method": method},
        **more,
    }


MXFP4 = spec("fp4", "per_group", group_size=32, scale_format="e8m0", ch_axis=-1, symmetric=None)
MXFP4_INPUTS = {**MXFP4, "is_dynamic": True}
FP8 = spec("fp8_e4m3", "per_tensor", symmetric=None)
FP8_CHANNEL = spec("fp8_e4m3", "per_channel", ch_axis=0, symmetric=None)
FP8_TOKEN = {**FP8_CHANNEL, "is_dynamic": True, "ch_axis": 1}
FP8_BLOCK = spec("fp8_e4m3", "per_block", block_size=[128, 128], symmetric=None)
FP8_GROUP = spec("fp8_e4m3", "per_group", group_size=128, is_dynamic=True, symmetric=None)
INT4_GROUP = spec("int4", "per_group", group_size=16, ch_axis=1)
UINT4_GROUP = spec("uint4", "per_group", group_size=16, ch_axis=1, symmetric=False)
INT4_CHANNEL = spec("int4", "per_channel", ch_axis=0)
NVFP4 = spec("fp4", "per_group", group_size=16, ch_axis=-1, symmetric=None)
SIGNED = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1]).double()


def pack_mxfp4(out: int, columns: int) -> Packed:
    codes, scale = random_codes(out, columns), exponents(out, -(-columns // 32))
    weight = E2M1[codes] * over_groups(powers(scale), 32, columns)
    return Packed({"weight": pack_pairs(codes), "weight_scale": scale}, weight)


def pack_nvfp4(out: int, columns: int) -> Packed:
    codes, scale = random_codes(out, columns), 16 * distinct(out, -(-columns // 16))
    of_matrix = torch.tensor((0.1 + out % 5) / 16)
    weight = E2M1[codes] * over_groups(scale, 16, columns) * of_matrix.double()
    tensors = {"weight": pack_pairs(codes), "weight_scale": scale.to(torch.float8_e4m3fn)}
    tensors |= {"weight_scale_2": of_matrix, "input_scale_2": torch.tensor(0.01)}
    return Packed(tensors, weight)


def fp8_codes(out: int, columns: int) -> torch.Tensor:
    """Every number but NaN occurs; most are about 1."""
    values = torch.randn(out * columns, generator=generator()).to(torch.float8_e4m3fn)
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F != 0x7F) & (every & 0x7F < 0x50)]
    values.view(torch.uint8)[: len(every)] = every[: len(values)]
    return values.view(out, columns)


def pack_fp8(out: int, columns: int) -> Packed:
    values, scale = fp8_codes(out, columns), torch.tensor(0.03 * (1 + out % 3))
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return Packed(tensors, values.double() * scale.double())


def pack_ptpc(out: int, columns: int) -> Packed:
    values, scale = fp8_codes(out, columns), distinct(out, 1)
    tensors = {"weight": values, "weight_scale": scale[:, 0].bfloat16()}
    return Packed(tensors, values.double() * scale)


def pack_fp8_float_blocks(out: int, columns: int) -> Packed:
    values, scale = fp8_codes(out, columns), distinct(-(-out // 128), -(-columns // 128))
    weight = values.double() * over_blocks(scale, 128, 128, out, columns)
    return Packed({"weight": values, "weight_scale": scale.float()}, weight)


def pack_fp8_blocks(out: int, columns: int) -> Packed:
    values, scale = fp8_codes(out, columns), exponents(-(-out // 128), -(-columns // 128))
    weight = values.double() * over_blocks(powers(scale), 128, 128, out, columns)
    return Packed({"weight": values, "weight_scale": scale}, weight)


def pack_int4_groups(order: tuple[int, ...], signed: bool) -> Callable[[int, int], Packed]:
    def pack(out: int, columns: int) -> Packed:
        codes, groups = random_codes(columns, out), -(-columns // 16)
        scale = distinct(groups, out)
        zeros = torch.zeros(groups, out).long() if signed else random_codes(groups, out)
        values = SIGNED[codes] if signed else (codes - zeros[torch.arange(columns) // 16]).double()
        weight = values * scale[torch.arange(columns) // 16]
        tensors = {
            "weight": pack_words(codes, order),
            "weight_scale": scale.half(),
            "weight_zero_point": pack_words(zeros, order),
        }
        return Packed(tensors, weight.T.contiguous())

    return pack


def pack_int4_channel(out: int, columns: int, order: tuple[int, ...] = AWQ_ORDER) -> Packed:
    codes, scale = random_codes(out, columns), distinct(out, 1)
    tensors = {"weight": pack_words(codes, order), "weight_scale": scale[:, 0].half()}
    tensors["weight_zero_point"] = torch.zeros(out, dtype=torch.int32)
    return Packed(tensors, SIGNED[codes] * scale)


def pack_w4a8(out: int, columns: int) -> Packed:
    packed = pack_int4_channel(out, columns)
    of_matrix = torch.tensor(0.5 + out % 3)
    tensors = dict(packed.tensors)
    tensors["weight_scale_2"] = tensors.pop("weight_scale")
    tensors["weight_scale"] = of_matrix
    tensors["weight"] = tensors["weight"].view(torch.uint32)
    return Packed(tensors, packed.weight * of_matrix.double())
