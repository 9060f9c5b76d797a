"""aiter as if it were installed: what its functions return, allocate and launch, without data.

Numbers of launches and workspaces as read in the sources of the commit that the image builds
(2026-08-22). A function that is not listed here cannot be rehearsed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from atom.plan.rehearsal.meter import Meter

# What this commit's `aiter._version` tells.
VERSION = "0.1.20"
# Rows of a block that the experts' kernels sort tokens into.
_SORTED_ROWS = 32

_QUANT_TYPES = ("per_128x128", "per_1x128", "per_Token", "per_1x32")

Result = Callable[..., Any]


@dataclass(frozen=True)
class _Call:
    """Attributes:
    launches: how many, or how many for these arguments.
    result: what it returns, allocated; None for what writes to its arguments.
    """

    launches: int | Callable[..., int] = 1
    result: Result = lambda *_, **__: None


def pretended_aiter(
    arch: str, compute_units: int, has_flydsl: bool, meter: Meter
) -> Mapping[str, Any]:
    """All functions and constants that the adapters use, by name; names are unique in aiter."""
    functions: dict[str, Any] = {name: _counted(call, meter) for name, call in _CALLS.items()}
    asked: dict[str, Any] = {
        "__version__": VERSION,
        "get_gfx": lambda: arch,
        "get_cu_num": lambda: compute_units,
        # The library's product, where no other is tuned.
        "get_GEMM_A16W16_config": lambda *_: {"libtype": "torch"},
        "QuantType": SimpleNamespace(**{name: name for name in _QUANT_TYPES}),
        "ActivationType": SimpleNamespace(Silu="Silu"),
        "get_2stage_cfgs": partial(_tuned_experts, arch),
        # Sums in any order, but for those that say otherwise.
        "stage2_uses_route_reduce": lambda *_: False,
        "is_flydsl_available": lambda *_: has_flydsl,
        "CXX_PS_REDUCE_AVAILABLE": True,
        "get_mla_metadata_info_v1": _work_sizes,
        "meta_size": lambda *_: 1 << 20,
        "allocate_meta_buffer": lambda *_: 0,
        "allocate_data_buffer": lambda *_: 0,
        "get_meta_buffer_ipc_handle": lambda *_: None,
        "init_custom_ar": lambda *_: 1,
        "register_input_buffer": lambda *_: None,
    }
    return functions | asked


def _tuned_experts(arch: str, tokens: int, hidden: int, *given: Any, **_: Any) -> SimpleNamespace:
    """The rows of the table for Kimi's MXFP4 experts: FlyDSL's kernels, of which those for fewer
    than 4096 tokens add in any order. For anything else aiter chooses by itself.
    """
    quant_type = given[6]
    if arch != "gfx950" or hidden != 7168 or quant_type != "per_1x32":
        return SimpleNamespace(stage1=None, stage2=None)
    second = "flydsl_mxmoe_stage2" + ("_atomic" if tokens < 4096 else "_reduce")
    return SimpleNamespace(
        stage1=partial(_same, kernelName="flydsl_mxmoe_stage1"),
        stage2=partial(_same, kernelName=second),
    )


def _counted(call: _Call, meter: Meter) -> Callable[..., Any]:
    def run(*args: Any, **given: Any) -> Any:
        launches = call.launches
        meter.launched("aiter", launches if isinstance(launches, int) else launches(*args, **given))
        return call.result(*args, **given)

    return run


def _same(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel() // 2, dtype=torch.int8)


def _like(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _product(x: torch.Tensor, weight: torch.Tensor, *_: Any, **given: Any) -> torch.Tensor:
    dtype = given.get("dtype") or given["otype"]
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


def _by_group(x: torch.Tensor, *_: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    codes = x.new_empty(x.shape, dtype=given["quant_dtype"])
    groups = x.shape[1] // given["group_size"]
    scale_type = given.get("scale_type") or torch.float32
    return codes, x.new_empty(x.shape[0], groups, dtype=scale_type)


def _by_token(x: torch.Tensor, *_: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    codes = x.new_empty(x.shape, dtype=given["quant_dtype"])
    return codes, x.new_empty(x.shape[0], 1, dtype=torch.float32)


def _by_32(x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    codes = x.new_empty(rows, columns // 2, dtype=torch.float4_e2m1fn_x2)
    padded = -(-rows // 256) * 256, -(-columns // 256) * 8
    return codes, x.new_empty(padded, dtype=torch.float8_e8m0fnu)


def _experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: Any, ids: Any, **given: Any
) -> torch.Tensor:
    """Between the products: sorted tokens, and for each of a token's experts its inner numbers."""
    del weights, w2, given
    tokens, chosen = ids.shape
    rows = tokens * chosen + w13.shape[0] * _SORTED_ROWS
    sorted_ids = ids.new_empty(2, rows)
    inner = x.new_empty(tokens, chosen, w13.shape[1] // 2)
    out = torch.empty_like(x)
    del sorted_ids, inner
    return out


def _launches_of_experts(*_: Any, **given: Any) -> int:
    """One kernel sorts tokens, and there are two products; quantised inputs are one more each."""
    return 5 if "quant_type" in given else 3


def _attention(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **given: Any
) -> Any:
    del key
    out = q.new_empty(q.shape[0], q.shape[1], value.shape[2])
    if not given.get("return_lse"):
        return out
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def _latent_decode(
    q: torch.Tensor, latents: torch.Tensor, out: torch.Tensor, *_: Any, **given: Any
) -> None:
    """What each part of a context leaves, in float32, with its sum."""
    del latents
    splits = given.get("num_kv_splits") or 1
    parts = q.new_empty(q.shape[0] * splits, q.shape[1], out.shape[2] + 1, dtype=torch.float32)
    del parts


def _launches_of_latents(*_: Any, **given: Any) -> int:
    """A fill of the numbers of splits, the assembly kernel, and what joins the splits; with lists
    of work no fill.
    """
    return 2 if "work_meta_data" in given else 3


def _gluon_decode(out: torch.Tensor, query: torch.Tensor, *args: Any, **_: Any) -> None:
    """The last positional argument is the number of partitions, each of which leaves a result."""
    parts = query.new_empty(args[-1], *out.shape)
    del parts


def _work_sizes(
    batch: int, queries: int, *_: Any, **given: Any
) -> tuple[tuple[int, torch.dtype], ...]:
    most = batch * queries * given.get("max_split_per_batch", 1)
    return (
        (2, torch.uint64),
        (most + 1, torch.int32),
        (most * 8, torch.int32),
        (most + 1, torch.int32),
        (most * 2, torch.int32),
        (most, torch.int32),
    )


_CALLS: Mapping[str, _Call] = {
    "gemm_a16w16": _Call(1, _product),
    "wvSpltK": _Call(),
    "gemm_a8w8": _Call(1, _product),
    "gemm_a8w8_bpreshuffle": _Call(1, _product),
    "gemm_a8w8_blockscale": _Call(1, _product),
    "gemm_a4w4": _Call(1, _product),
    "per_token_quant_hip": _Call(1, _by_token),
    "per_group_quant_hip": _Call(1, _by_group),
    "per_1x32_f4_quant_hip": _Call(2, _by_32),
    "static_per_tensor_quant": _Call(),
    "rmsnorm2d_fwd": _Call(1, _like),
    "rmsnorm2d_fwd_with_add": _Call(),
    "silu_and_mul": _Call(),
    "rope_cached_positions_2c_fwd_inplace": _Call(),
    "reshape_and_cache": _Call(),
    "reshape_and_cache_flash": _Call(),
    "concat_and_cache_mla": _Call(),
    "unified_attention": _Call(),
    "flash_attn_varlen_func": _Call(1, _attention),
    "pa_decode_gluon": _Call(2, _gluon_decode),
    "mla_decode_fwd": _Call(_launches_of_latents, _latent_decode),
    "get_mla_metadata_v1": _Call(),
    "biased_grouped_topk": _Call(),
    "grouped_topk": _Call(),
    "topk_softmax": _Call(),
    "fused_moe": _Call(_launches_of_experts, _experts),
    # A copy to the registered buffer, and the sum; what may lie there already is not copied.
    "all_reduce": _Call(2),
    "fused_allreduce_rmsnorm": _Call(1),
    # While loading.
    "shuffle_weight": _Call(0, _same),
    "e8m0_shuffle": _Call(0, _same),
    "pack_int8_to_packed_int4": _Call(0, _packed),
    "shuffle_scale_for_int4": _Call(0, _same),
}
