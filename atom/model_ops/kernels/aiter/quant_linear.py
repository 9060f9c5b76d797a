"""Products with quantised weights and inputs: aiter's a8w8 and a4w4 kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from atom.model_ops.kernels.aiter.quant import (
    E8M0_SHUFFLE,
    FP8_BLOCKS,
    FP8_CHANNEL,
    FP8_POWER_BLOCKS,
    FP8_STATIC,
    INT8_CHANNEL,
    MXFP4,
    e8m0_scales,
    fp8_weights,
    is_fnuz,
    refuses_arch,
    refuses_format,
    refuses_multiples,
)
from atom.model_ops.kernels.aiter.shuffle import SHUFFLE, refuses_shuffle, shuffle
from atom.model_ops.kernels.aiter.support import bounded, requires
from atom.model_ops.kernels.probe import EntryPoint, function
from atom.model_ops.kernels.triton.products.quant_inputs import limit_within
from atom.model_ops.kernels.triton.products.quant_layout import TileWeights
from atom.model_ops.kernels.triton.products.quant_linear import quant_linear as triton_linear
from atom.model_ops.quant.rounding import InputRounding, QuantInputs, Rows
from atom.model_ops.quant.weights import Activations, QuantWeights, WeightFormat
from atom.model_ops.registry import OpQuery

_PER_TOKEN = EntryPoint("aiter.ops.quant:per_token_quant_hip", "x", "quant_dtype")
_PER_GROUP = EntryPoint(
    "aiter.ops.quant:per_group_quant_hip", "x", "quant_dtype group_size scale_type"
)
_PER_1X32 = EntryPoint("aiter.ops.quant:per_1x32_f4_quant_hip", "x", "shuffle")
_STATIC = EntryPoint("aiter.ops.quant:static_per_tensor_quant", "out input scale")

# Of the two kernels for FP8 blocks the row-major one has gfx942's tuned shapes; of those for FP8
# channels the shuffled one has more of both architectures.
_A8W8 = EntryPoint("aiter.ops.gemm_op_a8w8:gemm_a8w8", "XQ WQ x_scale w_scale", "dtype")
_A8W8_SHUFFLED = EntryPoint(
    "aiter.ops.gemm_op_a8w8:gemm_a8w8_bpreshuffle", "XQ WQ x_scale w_scale", "dtype"
)
_A8W8_BLOCK = EntryPoint(
    "aiter.ops.gemm_op_a8w8:gemm_a8w8_blockscale", "XQ WQ x_scale w_scale", "dtype"
)
_A4W4 = EntryPoint("aiter.ops.gemm_op_a4w4:gemm_a4w4", "A B A_scale B_scale", "dtype")

# Inputs of the shuffled kernel where no shape is tuned: multiples of 64 from 192 on.
_STEP, _LEAST = 64, 192
# Inputs of the MXFP4 kernel: whole tiles of scales.
_MXFP4_STEP = 256

_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AiterWeights:
    """A matrix as one of aiter's kernels reads it.

    Attributes:
        out_features: rows of the matrix.
        quantise: x [T, in] -> codes and scales.
        product: the kernel.
        rounding: of inputs, of which another kernel makes the same codes and scales; None where
            scales are shuffled.
        tiles: the same codes for Triton's kernel, which rounds few inputs itself; None where it
            does not.
    """

    out_features: int
    codes: torch.Tensor
    scale: torch.Tensor
    quantise: Callable[[torch.Tensor], _Pair]
    product: EntryPoint
    rounding: InputRounding | None
    tiles: TileWeights | None


def takes_rounded(query: OpQuery) -> bool:
    """Whether a norm may round the inputs: not to MXFP4, whose scales are shuffled."""
    return query.weights != MXFP4


def prepare_linear(weights: QuantWeights, dtype: torch.dtype) -> AiterWeights:
    """Convert the codes, in place, and the scales to what the format's kernel reads.

    Args:
        dtype: of the inputs, which are quantised before the product.
    """
    del dtype
    form = weights.format
    assert form.activations is not None
    if form == MXFP4:
        assert weights.scale is not None
        codes = shuffle(weights.codes, torch.float4_e2m1fn_x2)
        scale, product = e8m0_scales(weights.scale), _A4W4
    elif form == INT8_CHANNEL:
        assert weights.row_scale is not None
        codes, scale = weights.codes, weights.row_scale.float()[:, None].contiguous()
        product = _A8W8
    else:
        codes, scale = fp8_weights(weights)
        product = _A8W8_BLOCK if form.columns else _A8W8_SHUFFLED
        codes = codes if form.columns else shuffle(codes)
    rounding = _rounding(form.activations, codes.dtype, weights.input_scale)
    quantise = _quantise(form.activations, codes.dtype, rounding)
    tiles = _tiles(form, codes, scale) if form in FP8_BLOCKS else None
    return AiterWeights(weights.shape[0], codes, scale, quantise, product, rounding, tiles)


def _tiles(form: WeightFormat, codes: torch.Tensor, scale: torch.Tensor) -> TileWeights:
    """FP8 blocks as they are, with their scales transposed."""
    form = replace(form, scale_type="float")
    empty = None, None, None, None
    return TileWeights(
        form, "codes", codes.shape[1], codes, scale.T.contiguous(), *empty, codes.dtype
    )


def quant_linear(x: Rows, weights: AiterWeights, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ W.T + bias`, x [..., in] -> [..., out], with x quantised as the format says.

    aiter's products of FP8 blocks want inputs quantised by a kernel before them. Where Triton's
    rounds few inputs itself, it runs: one launch instead of two.
    """
    if weights.tiles is not None and limit_within(x, weights.tiles):
        return triton_linear(x, weights.tiles, bias)
    if isinstance(x, QuantInputs):
        codes, scale = x.numbers, x.scale
    else:
        codes, scale = weights.quantise(x.reshape(-1, x.shape[-1]).contiguous())
    out: torch.Tensor = function(weights.product)(
        codes, weights.codes, scale, weights.scale, dtype=x.dtype
    )
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], weights.out_features)


def _rounding(
    how: Activations, dtype: torch.dtype, input_scale: torch.Tensor | None
) -> InputRounding | None:
    """Args:
    dtype: of the codes.
    """
    if how.codes == "fp4":
        return None
    if not how.is_static:
        return InputRounding(how, None, dtype)
    assert input_scale is not None
    return InputRounding(how, input_scale.float().reshape(1) * (2 if is_fnuz() else 1), dtype)


def _quantise(
    how: Activations, dtype: torch.dtype, rounding: InputRounding | None
) -> Callable[[torch.Tensor], _Pair]:
    """Args:
    dtype: of the codes.
    """
    if rounding is None:
        return partial(function(_PER_1X32), shuffle=True)
    if rounding.input_scale is not None:
        return partial(_static, rounding.input_scale, dtype)
    if not how.group:
        return partial(function(_PER_TOKEN), quant_dtype=dtype)
    by_group = partial(function(_PER_GROUP), quant_dtype=dtype, group_size=how.group)
    return partial(_powers, by_group) if how.scale_type == "e8m0" else by_group


def _static(scale: torch.Tensor, dtype: torch.dtype, x: torch.Tensor) -> _Pair:
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    function(_STATIC)(codes, bounded(x, scale, dtype), scale)
    return codes, scale.repeat(x.shape[0], 1)


def _powers(by_group: Callable[..., _Pair], x: torch.Tensor) -> _Pair:
    """Assumes that the least power of two is chosen that is at least amax / limit."""
    codes, scale = by_group(x, scale_type=torch.float8_e8m0fnu)
    return codes, scale.float()


def _refuses_block(query: OpQuery) -> str | None:
    sizes = query.shape
    return refuses_multiples(
        in_features=(sizes["in_features"], 128), out_features=(sizes["out_features"], 16)
    )


def _refuses_channel(query: OpQuery) -> str | None:
    out, size = query.shape["out_features"], query.shape["in_features"]
    if size < _LEAST:
        return f"in_features={size} is below {_LEAST}"
    return refuses_multiples(in_features=(size, _STEP)) or refuses_shuffle(out, size)


def _refuses_int8(query: OpQuery) -> str | None:
    return refuses_multiples(**{n: (query.shape[n], 16) for n in ("in_features", "out_features")})


def _refuses_mxfp4(query: OpQuery) -> str | None:
    out, size = query.shape["out_features"], query.shape["in_features"]
    return (
        refuses_arch(query.platform.arch)
        or refuses_multiples(in_features=(size, _MXFP4_STEP))
        or refuses_shuffle(out, size // 2)
    )


_REFUSES = {
    **dict.fromkeys(
        FP8_BLOCKS + FP8_POWER_BLOCKS, requires(_PER_GROUP, _A8W8_BLOCK, also=_refuses_block)
    ),
    FP8_CHANNEL: requires(_PER_TOKEN, _A8W8_SHUFFLED, SHUFFLE, also=_refuses_channel),
    FP8_STATIC: requires(_STATIC, _A8W8_SHUFFLED, SHUFFLE, also=_refuses_channel),
    INT8_CHANNEL: requires(_PER_TOKEN, _A8W8, also=_refuses_int8),
    MXFP4: requires(
        _PER_1X32, _A4W4, SHUFFLE, E8M0_SHUFFLE, also=_refuses_mxfp4, dtypes=(torch.bfloat16,)
    ),
}


def refuses(query: OpQuery) -> str | None:
    """Why aiter cannot multiply these weights; None if it can."""
    if reason := refuses_format(query.weights, tuple(_REFUSES)):
        return reason
    assert query.weights is not None
    return _REFUSES[query.weights](query)
