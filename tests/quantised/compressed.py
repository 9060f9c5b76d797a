"""Writes matrices in the formats of compressed-tensors, bit by bit, and its configurations."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from quantised import activations
from quantised.packing import Pack, Packed
from quantised.writers import E2M1, over_blocks, over_groups, pack_pairs, pack_words

Numbers = Mapping[str, Any]


def config(
    layout: str, weights: Numbers, inputs: Numbers | None = None, **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


def ints(bits: int, group: int | None, symmetric: bool = True) -> dict[str, Any]:
    strategy = "group" if group else "channel"
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "group_size": group,
        "symmetric": symmetric,
    }


def floats(bits: int, strategy: str, size: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "float",
        "strategy": strategy,
        "group_size": size,
        "symmetric": True,
        **more,
    }


INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8_TOKENS = floats(8, "token", dynamic=True)
INT4 = config("pack-quantized", ints(4, 32))
NVFP4 = config("nvfp4-pack-quantized", floats(4, "tensor_group", 16))
NVFP4_INPUTS = floats(4, "tensor_group", 16, dynamic="local")
MXFP4 = config("mxfp4-pack-quantized", floats(4, "group", 32))


def seeded(name: str, *shape: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {shape}".encode()))


def all_codes(name: str, out: int, columns: int, count: int) -> torch.Tensor:
    """Random codes 0..count-1, [out, columns]; each occurs."""
    codes = torch.randint(0, count, (out, columns), generator=seeded(name, out, columns))
    codes.view(-1)[-count:] = torch.arange(count)
    return codes


def scales(name: str, *shape: int) -> torch.Tensor:
    """Different ones, of bfloat16."""
    return (0.01 + 0.05 * torch.rand(shape, generator=seeded(name, *shape))).bfloat16()


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned [rows, n] -> int32 [rows, ceil(n * bits / 32)], element i from bit i * bits on."""
    per_word = 32 // bits
    return pack_words(F.pad(values, (0, -values.shape[1] % per_word)), range(per_word))


def integers(
    bits: int,
    group: int | None,
    symmetric: bool = True,
    index: Callable[[int], torch.Tensor] | None = None,
) -> Pack:
    """`pack-quantized`; `index` gives the group of each input, if they are not in order."""

    def pack(module: str, out: int, columns: int) -> Packed | None:
        if "lm_head" in module:
            return None
        groups = torch.arange(columns) // (group or columns) if index is None else index(columns)
        stored = all_codes(module, out, columns, 1 << bits)
        scale = scales(module, out, int(groups.max()) + 1)
        tensors = {
            "weight_packed": words(stored, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([out, columns]),
        }
        zeros = torch.full(scale.shape, 1 << (bits - 1))
        if not symmetric:
            zeros = torch.randint(0, 1 << bits, scale.shape, generator=seeded(module, out))
            zeros.view(-1)[:2] = torch.tensor([0, (1 << bits) - 1])
            tensors["weight_zero_point"] = words(zeros.T, bits).T
        if index is not None:
            tensors["weight_g_idx"] = groups.int()
        return Packed(tensors, (stored - zeros[:, groups]) * scale[:, groups].double())

    return pack


def bytes_of(codes: str, rows: int, size: int, static: bool = False) -> Pack:
    """`int-quantized`, `float-quantized`, `naive-quantized`; rows or size 0 for the whole."""

    def pack(module: str, out: int, columns: int) -> Packed | None:
        if "lm_head" in module:
            return None
        stored = all_codes(module, out, columns, 256).to(torch.uint8)
        if codes == "fp8":
            stored[(stored & 0x7F) == 0x7F] = 0x7E
            values = activations.E4M3[(stored & 0x7F).long()] * (1 - 2 * (stored >> 7).double())
        elif codes == "int4":
            stored = (stored.view(torch.int8) >> 4).view(torch.uint8)
        if codes != "fp8":
            values = stored.view(torch.int8).double()
        height, width = rows or out, size or columns
        shape = -(-out // height), -(-columns // width)
        scale = scales(module, *shape) / (16 if codes == "int8" else 4)
        tensors = {
            "weight": stored.view(torch.float8_e4m3fn if codes == "fp8" else torch.int8),
            "weight_scale": scale.view(-1) if rows == size == 0 else scale,
        }
        if static:
            tensors["input_scale"] = torch.tensor([0.02])
        return Packed(tensors, values * over_blocks(scale.double(), height, width, out, columns))

    return pack


def pack_nvfp4(with_inputs: bool = False) -> Pack:
    def pack(module: str, out: int, columns: int) -> Packed | None:
        if "lm_head" in module:
            return None
        codes = all_codes(module, out, columns, 16)
        scale = (scales(module, out, -(-columns // 16)).float() * 500).to(torch.float8_e4m3fn)
        divisor = 50.0 + len(module) % 7 + (3 if "k_proj" in module else 0)
        tensors = {
            "weight_packed": pack_pairs(codes),
            "weight_scale": scale,
            "weight_global_scale": torch.tensor([divisor]),
        }
        if with_inputs:
            tensors["input_global_scale"] = torch.tensor([800.0])
        weight = E2M1[codes] * over_groups(scale.double(), 16, columns) / divisor
        return Packed(tensors, weight)

    return pack


def pack_mx(bits: int = 4) -> Pack:
    def pack(module: str, out: int, columns: int) -> Packed | None:
        if "lm_head" in module:
            return None
        shape = out, -(-columns // 32)
        exponents = torch.randint(120, 125, shape, generator=seeded(module, *shape))
        scale = torch.exp2(exponents.double() - 127)
        exponents = exponents.to(torch.uint8)
        if bits == 4:
            codes = all_codes(module, out, columns, 16)
            tensors = {"weight_packed": pack_pairs(codes), "weight_scale": exponents}
            return Packed(tensors, E2M1[codes] * over_groups(scale, 32, columns))
        packed = bytes_of("fp8", 1, 32)(module, out, columns)
        assert packed is not None
        stored = packed.tensors["weight"]
        weight = stored.double() * over_groups(scale, 32, columns) / 16
        exponents = exponents - 4
        return Packed({"weight": stored, "weight_scale": exponents}, weight)

    return pack


FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "int4": (INT4, integers(4, 32)),
    "int4 channel": (config("pack-quantized", ints(4, None)), integers(4, None)),
    "int4 zeros": (config("pack-quantized", ints(4, 32, False)), integers(4, 32, False)),
    "int4 channel zeros": (
        config("pack-quantized", ints(4, None, False)),
        integers(4, None, False),
    ),
    "int8": (config("pack-quantized", ints(8, 16)), integers(8, 16)),
    "int8 channel": (config("pack-quantized", ints(8, None)), integers(8, None)),
    "int8 zeros": (config("pack-quantized", ints(8, 16, False)), integers(8, 16, False)),
    "w8a8": (config("int-quantized", ints(8, None), INT8_TOKENS), bytes_of("int8", 1, 0)),
    "w4a8": (config("int-quantized", ints(4, 32), INT8_TOKENS), bytes_of("int4", 1, 32)),
    "fp8": (config("float-quantized", floats(8, "tensor"), FP8_TOKENS), bytes_of("fp8", 0, 0)),
    "fp8 channel": (
        config("float-quantized", floats(8, "channel"), FP8_TOKENS),
        bytes_of("fp8", 1, 0),
    ),
    "fp8 block": (
        config(
            "float-quantized",
            floats(8, "block", block_structure="16x32"),
            floats(8, "group", 128, dynamic=True),
        ),
        bytes_of("fp8", 16, 32),
    ),
    "fp8 weight-only": (config("naive-quantized", floats(8, "channel")), bytes_of("fp8", 1, 0)),
    "nvfp4": (NVFP4, pack_nvfp4()),
    "nvfp4 inputs": (
        config("nvfp4-pack-quantized", floats(4, "tensor_group", 16), NVFP4_INPUTS),
        pack_nvfp4(with_inputs=True),
    ),
    "mxfp4": (MXFP4, pack_mx()),
    "mxfp8": (config("mxfp8-quantized", floats(8, "group", 32)), pack_mx(8)),
}
