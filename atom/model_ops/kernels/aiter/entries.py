"""The `aiter` entries of the op table, by op; of two, the packed one is the better."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.aiter import attention, cache_write, elementwise, linear, mla, moe
from atom.model_ops.kernels.aiter.layout import PACKED, PACKED_ENTRY_POINTS, refuses_packing
from atom.model_ops.kernels.aiter.support import implementation, refuses_storage
from atom.model_ops.registry import Implementation

_BF16 = (torch.bfloat16,)

AITER: dict[str, tuple[Implementation, ...]] = {
    "linear": (implementation(linear.load, "gemm_a16w16"),),
    "rms_norm": (implementation(elementwise.load_rms_norm, "rmsnorm2d_fwd"),),
    "add_rms_norm": (implementation(elementwise.load_add_rms_norm, "rmsnorm2d_fwd_with_add"),),
    "silu_and_mul": (implementation(elementwise.load_silu_and_mul, "silu_and_mul"),),
    "rope": (implementation(elementwise.load_rope, "rope_cached_positions_2c_fwd_inplace"),),
    "kv_cache_write": (
        implementation(
            cache_write.load_packed, *PACKED_ENTRY_POINTS, refuses=refuses_packing, layout=PACKED
        ),
        implementation(cache_write.load_plain, "reshape_and_cache_flash", refuses=refuses_storage),
    ),
    "paged_attention": (
        implementation(
            attention.load_packed_decode,
            *PACKED_ENTRY_POINTS,
            refuses=refuses_packing,
            layout=PACKED,
        ),
        implementation(
            attention.load_plain_decode,
            "unified_attention",
            refuses=attention.refuses_plain_decode,
        ),
    ),
    "prefill_attention": (
        implementation(
            attention.load_packed_prefill,
            *PACKED_ENTRY_POINTS,
            refuses=refuses_packing,
            layout=PACKED,
        ),
        implementation(
            attention.load_plain_prefill,
            "unified_attention",
            "flash_attn_varlen_func",
            refuses=attention.refuses_plain,
        ),
    ),
    "mla_cache_write": (
        implementation(cache_write.load_latent, "concat_and_cache_mla", refuses=refuses_storage),
    ),
    "mla_decode": (
        implementation(mla.load_decode, "mla_decode_fwd", refuses=mla.refuses_decode, dtypes=_BF16),
    ),
    "mla_prefill": (
        implementation(mla.load_prefill, "flash_attn_varlen_func", refuses=mla.refuses_prefill),
    ),
    "moe_route": (
        implementation(
            moe.load_route,
            "biased_grouped_topk",
            "grouped_topk",
            "topk_softmax",
            refuses=moe.refuses_route,
            dtypes=(torch.float32,),
        ),
    ),
    "moe_experts": (implementation(moe.load_experts, "fused_moe", refuses=moe.refuses_experts),),
}
