"""Which kernels aiter's fused mixture of experts runs, and whether they can: asked at start.

aiter looks both products up in its table of tuned kernels, by the number of tokens rounded up to a
power of two, and starts what the table names without asking whether it is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atom.model_ops.kernels.probe import EntryPoint, function, lacks_package
from atom.model_ops.registry import OpQuery

QUANT_TYPE = EntryPoint("aiter.ops.enum:QuantType", "")
_ACTIVATION = EntryPoint("aiter.ops.enum:ActivationType", "")
_CONFIG = EntryPoint(
    "aiter.fused_moe:get_2stage_cfgs",
    "token model_dim inter_dim expert topk dtype q_dtype_a q_dtype_w q_type use_g1u1 activation "
    "doweight_stage1 hidden_pad intermediate_pad",
    "is_ep",
)
# Whether a second product writes a result for each choice, which another kernel sums up.
_SUMS_LATER = EntryPoint("aiter.fused_moe:stage2_uses_route_reduce", "stage2")
TUNED = (QUANT_TYPE, _ACTIVATION, _CONFIG, _SUMS_LATER)

# Numbers of tokens that are looked up.
_TOKENS = tuple(2**n for n in range(16))
# aiter's table knows blocks of weights by the groups of their inputs.
_LOOKED_UP = {"per_128x128": "per_1x128"}

_FLYDSL = "flydsl"
# Kernels for MXFP4 whose sorting of tokens drops a mask of experts; aiter raises an error.
_UNMASKED = "flydsl_mxmoe_"
# Among their names, those that add results in any order.
_ATOMIC = "_atomic"


@dataclass(frozen=True)
class _Kernels:
    """Names of the kernels of both products, "" for those that aiter chooses by itself.

    Attributes:
        in_any_order: whether results of a token's experts are added as they come.
    """

    names: tuple[str, ...]
    in_any_order: bool


def refuses_tuned(
    query: OpQuery, quant_type: str, inputs: torch.dtype, weights: torch.dtype
) -> str | None:
    """Why the kernels that aiter would run cannot; None if all can.

    Args:
        query: its shape has `top_k`, and `elsewhere` experts of other ranks.
        quant_type: aiter's name of the format.
        inputs, weights: types that the products multiply.
    """
    try:
        chosen = _chosen(query, quant_type, inputs, weights)
    except Exception as error:
        what = " ".join(str(error).split())
        return f"it cannot tell which kernels it runs: {type(error).__name__}: {what}"
    flydsl = _with_names(chosen, "flydsl_")
    if flydsl and (reason := lacks_package(_FLYDSL)):
        return f"its kernels for {_range(flydsl)} are FlyDSL's, and {reason}"
    unmasked = _with_names(chosen, _UNMASKED) if query.shape["elsewhere"] else []
    if unmasked:
        return f"its kernels for {_range(unmasked)} take no experts that other ranks hold"
    return None


def note_tuned(query: OpQuery, quant_type: str, inputs: torch.dtype, weights: torch.dtype) -> str:
    """What the table of ops says of kernels whose results differ from run to run."""
    chosen = _chosen(query, quant_type, inputs, weights)
    tokens = [count for count, kernels in chosen.items() if kernels.in_any_order]
    if not tokens:
        return ""
    return f"{_range(tokens)}: adds experts' results in any order (atomics), so bits may vary"


def _chosen(
    query: OpQuery, quant_type: str, inputs: torch.dtype, weights: torch.dtype
) -> Mapping[int, _Kernels]:
    """What aiter runs, by number of tokens; it takes one off the number of choices if a mask is
    given, see `moe.with_masked_choice`.
    """
    shape = query.shape
    is_spread = shape["elsewhere"] > 0
    kind = getattr(function(QUANT_TYPE), _LOOKED_UP.get(quant_type, quant_type))
    activation: Any = function(_ACTIVATION)
    chosen = {}
    for tokens in _TOKENS:
        config = function(_CONFIG)(
            tokens,
            shape["hidden_size"],
            shape["intermediate_size"],
            shape["num_experts"],
            shape["top_k"] + is_spread,
            query.dtype,
            inputs,
            weights,
            kind,
            True,
            activation.Silu,
            False,
            0,
            0,
            is_ep=is_spread,
        )
        first, second = _name(config.stage1), _name(config.stage2)
        if first.startswith(_UNMASKED):
            in_any_order = _ATOMIC in second
        else:
            in_any_order = not function(_SUMS_LATER)(config.stage2)
        chosen[tokens] = _Kernels((first, second), in_any_order)
    return chosen


def _name(stage: Any) -> str:
    """The name that a stage, a `partial` or None, is bound to."""
    bound = {} if stage is None else stage.keywords
    found = (bound.get(key) for key in ("kernelName", "kernelName1", "kernelName2"))
    return next((name for name in found if isinstance(name, str)), "")


def _with_names(chosen: Mapping[int, _Kernels], prefix: str) -> list[int]:
    return [n for n, kernels in chosen.items() if any(k.startswith(prefix) for k in kernels.names)]


def _range(tokens: list[int]) -> str:
    """The numbers of tokens, from 1 on or those looked up."""
    if tokens == list(_TOKENS):
        return "any number of tokens"
    if tokens == list(_TOKENS[: len(tokens)]):
        return f"up to {tokens[-1]} tokens"
    return f"{', '.join(map(str, tokens))} tokens"
