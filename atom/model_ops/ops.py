"""Every op and its implementations. Which is best is the platform's: `registry.preference`."""

from __future__ import annotations

from atom.model_ops.kernels.aiter.entries import AITER
from atom.model_ops.kernels.gluon import support as gluon
from atom.model_ops.kernels.native import attention as native_attention
from atom.model_ops.kernels.native import elementwise as native_elementwise
from atom.model_ops.kernels.native import linear as native_linear
from atom.model_ops.kernels.native import sampling as native_sampling
from atom.model_ops.kernels.native.bindings import implementation as native
from atom.model_ops.kernels.torch import attention, elementwise, linear, mla, moe, sampling
from atom.model_ops.kernels.triton import attention as triton_attention
from atom.model_ops.kernels.triton import elementwise as triton_elementwise
from atom.model_ops.kernels.triton import mla as triton_mla
from atom.model_ops.kernels.triton import moe as triton_moe
from atom.model_ops.kernels.triton import sampling as triton_sampling
from atom.model_ops.kernels.triton.support import implementation as triton
from atom.model_ops.registry import Implementation, always

OPS: dict[str, tuple[Implementation, ...]] = {
    "linear": (
        *AITER["linear"],
        native(native_linear.load, native_linear.refuses),
        Implementation("torch", always, linear.load),
    ),
    "rms_norm": (
        *AITER["rms_norm"],
        native(native_elementwise.load_rms_norm),
        triton(triton_elementwise.load_rms_norm, triton_elementwise.refuses_norm),
        Implementation("torch", always, lambda: elementwise.rms_norm),
    ),
    "add_rms_norm": (
        *AITER["add_rms_norm"],
        native(native_elementwise.load_add_rms_norm),
        triton(triton_elementwise.load_add_rms_norm, triton_elementwise.refuses_norm),
        Implementation("torch", always, lambda: elementwise.add_rms_norm),
    ),
    "silu_and_mul": (
        *AITER["silu_and_mul"],
        native(native_elementwise.load_silu_and_mul),
        triton(triton_elementwise.load_silu_and_mul),
        Implementation("torch", always, lambda: elementwise.silu_and_mul),
    ),
    "rope": (
        *AITER["rope"],
        native(native_elementwise.load_rope),
        triton(triton_elementwise.load_rope),
        Implementation("torch", always, lambda: elementwise.rope),
    ),
    "kv_cache_write": (
        *AITER["kv_cache_write"],
        native(native_attention.load_kv_cache_write, native_attention.refuses_storage),
        triton(triton_attention.load_kv_cache_write, triton_attention.refuses_storage),
        Implementation("torch", always, lambda: attention.kv_cache_write),
    ),
    "paged_attention": (
        *AITER["paged_attention"],
        gluon.PAGED_ATTENTION,
        native(native_attention.load_paged_attention, native_attention.refuses),
        triton(triton_attention.load_paged_attention, triton_attention.refuses),
        Implementation("torch", always, lambda: attention.paged_attention),
    ),
    "prefill_attention": (
        *AITER["prefill_attention"],
        native(native_attention.load_paged_attention, native_attention.refuses),
        triton(triton_attention.load_prefill_attention, triton_attention.refuses),
        Implementation("torch", always, lambda: attention.paged_attention),
    ),
    "mla_cache_write": (
        *AITER["mla_cache_write"],
        triton(triton_mla.load_mla_cache_write, triton_attention.refuses_storage),
        Implementation("torch", always, lambda: mla.mla_cache_write),
    ),
    "mla_decode": (
        *AITER["mla_decode"],
        triton(triton_mla.load_mla_decode, triton_mla.refuses),
        Implementation("torch", always, lambda: mla.mla_attention),
    ),
    "mla_prefill": (
        *AITER["mla_prefill"],
        triton(triton_mla.load_mla_prefill, triton_mla.refuses),
        Implementation("torch", always, lambda: mla.mla_attention),
    ),
    "moe_route": (
        *AITER["moe_route"],
        triton(triton_moe.load_route, triton_moe.refuses_route),
        Implementation("torch", always, lambda: moe.moe_route),
    ),
    "moe_experts": (
        *AITER["moe_experts"],
        triton(triton_moe.load_experts, triton_moe.refuses_experts),
        Implementation("torch", always, moe.load),
    ),
    "choose_tokens": (
        triton(triton_sampling.load_choose_tokens, triton_sampling.refuses_choice),
        Implementation("torch", always, lambda: sampling.choose_tokens),
    ),
    "mask_tokens": (
        native(native_sampling.load_mask_tokens),
        triton(triton_sampling.load_mask_tokens),
        Implementation("torch", always, lambda: sampling.mask_tokens),
    ),
}
