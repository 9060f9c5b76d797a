"""Experts with quantised weights and inputs: aiter's fused mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom.environment import op_override
from atom.model_ops.gates import refuses_gates
from atom.model_ops.kernels import probe
from atom.model_ops.kernels.aiter.moe import FUSED, held_experts, with_masked_choice
from atom.model_ops.kernels.aiter.quant import (
    E8M0_SHUFFLE,
    FP8_BLOCKS,
    FP8_CHANNEL,
    INT4,
    MXFP4,
    e8m0_scales,
    fp8_weights,
    refuses_arch,
    refuses_format,
    refuses_multiples,
)
from atom.model_ops.kernels.aiter.shuffle import (
    PACK_INT4,
    SCALE_INT4,
    SHUFFLE,
    shuffle,
    shuffle_int4,
)
from atom.model_ops.kernels.aiter.support import requires
from atom.model_ops.kernels.aiter.tuned_experts import (
    QUANT_TYPE,
    TUNED,
    note_tuned,
    refuses_tuned,
)
from atom.model_ops.kernels.probe import EntryPoint, function
from atom.model_ops.quant.weights import QuantWeights
from atom.model_ops.registry import OpQuery

_HAS_FLYDSL = EntryPoint("aiter.fused_moe:is_flydsl_available", "")

# aiter's name for each format, and the multiple of elements that its kernels read: 128 bytes, but
# those of 256 for the scales of MXFP4, and tiles of 128 numbers for INT4.
_FORMATS = {
    **dict.fromkeys(FP8_BLOCKS, ("per_128x128", 128)),
    FP8_CHANNEL: ("per_Token", 128),
    MXFP4: ("per_1x32", 256),
    INT4: ("per_1x32", 128),
}

# The kernels of INT4 count bytes of codes in 32 bits.
_MOST_BYTES = 2**32
# Those of a table are measured for these sizes, those of Kimi on 8, 4 and 2 ranks. Where there is
# none, a program of the first product takes so many numbers between the products.
_TUNED_ARCH, _TUNED_HIDDEN, _TUNED_INTER = "gfx950", 7168, (256, 512, 1024)
_UNTUNED_TILE = 128


@dataclass(frozen=True)
class AiterExperts:
    """The matrices of all experts, as aiter reads them.

    Attributes:
        quant_type: aiter's name of the format.
        codes: [experts, out, in], shuffled; MXFP4 and INT4 have two to an element.
        scale: float32 [experts, ...]; e8m0 [experts * out, groups], shuffled; of INT4 as
            `shuffle_int4` makes them.
    """

    quant_type: str
    codes: torch.Tensor
    scale: torch.Tensor


def prepare_experts(
    w13: QuantWeights, w2: QuantWeights, dtype: torch.dtype
) -> tuple[AiterExperts, AiterExperts]:
    """The codes are converted in place.

    Args:
        w13: [experts, 2 * inter, hidden], gate above up. w2: [experts, hidden, inter].
        dtype: of the inputs, which the kernels quantise themselves where the format says so.
    """
    del dtype
    return _prepare(w13), _prepare(w2)


def _prepare(weights: QuantWeights) -> AiterExperts:
    quant_type, _ = _FORMATS[weights.format]
    if weights.format == MXFP4:
        assert weights.scale is not None
        codes = shuffle(weights.codes, torch.float4_e2m1fn_x2)
        return AiterExperts(quant_type, codes, e8m0_scales(weights.scale))
    if weights.format == INT4:
        return AiterExperts(quant_type, *shuffle_int4(weights))
    codes, scale = fp8_weights(weights)
    return AiterExperts(quant_type, shuffle(codes), scale)


def quant_experts(
    x: torch.Tensor,
    w13: AiterExperts,
    w2: AiterExperts,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
) -> torch.Tensor:
    """`sum_k weights[t, k] * expert[ids[t, k]](x[t])`, x [T, hidden] -> [T, hidden].

    Inputs of both products are quantised as the format says. Assumes that SiLU is the default
    activation, and that the first half of w13's rows is the gate.
    """
    mask = held_experts(w13.codes.shape[0], elsewhere, x.device)
    out: torch.Tensor = function(FUSED)(
        x.contiguous(),
        w13.codes,
        w2.codes,
        *with_masked_choice(weights, ids, mask),
        expert_mask=mask,
        quant_type=getattr(function(QUANT_TYPE), w13.quant_type),
        w1_scale=w13.scale,
        w2_scale=w2.scale,
    )
    return out


def _refuses(query: OpQuery) -> str | None:
    if reason := refuses_gates(query.shape) or refuses_format(query.weights, tuple(_FORMATS)):
        return reason
    assert query.weights is not None
    _, step = _FORMATS[query.weights]
    sizes = {name: (query.shape[name], step) for name in ("hidden_size", "intermediate_size")}
    if query.weights == MXFP4 and (reason := refuses_arch(query.platform.arch)):
        return reason
    reason = refuses_multiples(**sizes)
    if reason is None and query.weights == INT4:
        reason = _refuses_int4(query)
    return reason or refuses_tuned(query, *_looked_up(query))


def _refuses_int4(query: OpQuery) -> str | None:
    if reason := probe.refusal(PACK_INT4, SCALE_INT4, _HAS_FLYDSL):
        return reason
    if not function(_HAS_FLYDSL)():
        return "its INT4 kernels are flydsl's, which is not installed"
    count, hidden, inter = (
        query.shape[name] for name in ("num_experts", "hidden_size", "intermediate_size")
    )
    if (size := count * inter * hidden) >= _MOST_BYTES:
        return f"{size} bytes of codes; its INT4 kernels reach less than {_MOST_BYTES}"
    arch, tuned = query.platform.arch, " or ".join(map(str, _TUNED_INTER))
    is_tuned = arch == _TUNED_ARCH and hidden == _TUNED_HIDDEN and inter in _TUNED_INTER
    if is_tuned or op_override("quant_experts") == "aiter":
        return None
    return (
        f"has measured INT4 kernels for {_TUNED_ARCH} and experts of {_TUNED_HIDDEN} x {tuned}, "
        f"not for {arch} and {hidden} x {inter}, where {inter // _UNTUNED_TILE} programs would "
        f"read an expert; ATOM_OP_QUANT_EXPERTS=aiter runs them"
    )


def note(query: OpQuery) -> str:
    """What the table of ops says of `quant_experts`."""
    return note_tuned(query, *_looked_up(query))


def _looked_up(query: OpQuery) -> tuple[str, torch.dtype, torch.dtype]:
    """aiter's name of the format, and what its products multiply."""
    assert query.weights is not None
    quant_type, _ = _FORMATS[query.weights]
    if query.weights == INT4:
        return quant_type, query.dtype, torch.int4  # type: ignore[attr-defined]
    codes = torch.float4_e2m1fn_x2 if query.weights == MXFP4 else query.platform.fp8_dtype
    return quant_type, codes, codes


refuses = requires(
    FUSED,
    SHUFFLE,
    E8M0_SHUFFLE,
    *TUNED,
    also=_refuses,
    dtypes=(torch.bfloat16,),
)
