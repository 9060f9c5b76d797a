"""The entry points of aiter that the adapters call, and the parameters that they pass.

As of aiter's main branch of 2026-08-22.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EntryPoint:
    """Attributes:
    module: where it is defined.
    positional: the leading parameters, passed by position.
    keywords: parameters passed by name.
    """

    module: str
    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()


def _entry(module: str, positional: str, keywords: str = "") -> EntryPoint:
    return EntryPoint(module, tuple(positional.split()), tuple(keywords.split()))


ENTRY_POINTS: Mapping[str, EntryPoint] = {
    "gemm_a16w16": _entry("aiter.tuned_gemm", "A B", "bias otype"),
    "rmsnorm2d_fwd": _entry("aiter.ops.rmsnorm", "input weight epsilon"),
    "rmsnorm2d_fwd_with_add": _entry(
        "aiter.ops.rmsnorm", "out input residual_in residual_out weight epsilon"
    ),
    "rope_cached_positions_2c_fwd_inplace": _entry(
        "aiter.ops.rope",
        "input_x input_y cos sin positions rotate_style reuse_freqs_front_part nope_first",
    ),
    "silu_and_mul": _entry("aiter.ops.activation", "out input"),
    "reshape_and_cache": _entry(
        "aiter.ops.cache",
        "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale asm_layout",
    ),
    "reshape_and_cache_flash": _entry(
        "aiter.ops.cache",
        "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale",
    ),
    "concat_and_cache_mla": _entry(
        "aiter.ops.cache", "kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale"
    ),
    "unified_attention": _entry(
        "aiter.ops.triton.attention.unified_attention",
        "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal "
        "window_size block_table softcap q_descale k_descale v_descale",
        "shuffled_kv_cache",
    ),
    "pa_decode_gluon": _entry(
        "aiter.ops.triton.gluon.pa_decode_gluon",
        "output query key_cache value_cache context_lengths block_tables softmax_scale "
        "query_length max_context_partition_num",
        "context_partition_size compute_type key_scale value_scale ps",
    ),
    "flash_attn_varlen_func": _entry(
        "aiter.ops.mha",
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        "softmax_scale causal window_size",
    ),
    "mla_decode_fwd": _entry(
        "aiter.mla",
        "q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q",
        "page_size nhead_kv sm_scale",
    ),
    "biased_grouped_topk": _entry(
        "aiter.ops.topk",
        "gating_output correction_bias topk_weights topk_ids num_expert_group topk_group "
        "need_renorm",
        "routed_scaling_factor",
    ),
    "grouped_topk": _entry(
        "aiter.ops.topk",
        "gating_output topk_weights topk_ids num_expert_group topk_group need_renorm",
        "is_softmax routed_scaling_factor",
    ),
    "topk_softmax": _entry(
        "aiter.ops.moe_op",
        "topk_weights topk_indices token_expert_indices gating_output need_renorm",
    ),
    "fused_moe": _entry("aiter.fused_moe", "hidden_states w1 w2 topk_weight topk_ids"),
}
