"""All ops and their implementations, one line each. `registry.preference` has their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from atom.model_ops.kernels.native import bindings as native
from atom.model_ops.kernels.triton import support as triton
from atom.model_ops.registry import PACKED, PLAIN, Implementation, OpQuery, always

# Why no kernel of a folder can run; checked before any of its modules is imported.
_FOLDERS: Mapping[str, Callable[[OpQuery], str | None]] = {
    "aiter": always,  # each adapter says which entry points it requires
    "flash_mla": always,
    "gluon": triton.refuses_gluon,
    "native": native.refuses,
    "torch": always,
    "triton": triton.refuses,
}


def _kernel(
    function: str,
    refuses: str | None = None,
    layout: str = PLAIN,
    prepare: str | None = None,
    note: Callable[[OpQuery], str] = lambda _: "",
    dequantises: bool = False,
    batch_invariant: bool = False,
    takes_rounded: str | None = None,
    takes_plain: bool = False,
) -> Implementation:
    """One implementation. Nothing that it names is imported before it is needed.

    Args:
        function: `folder.module:function` in `kernels`; the folder is the implementation's name.
        refuses: path of a function that returns why `function` cannot run, or None if it can. None
            if the folder's check suffices.
        layout: of the KV cache.
        prepare: path of the function that converts weights once after loading.
        note: what the choice costs, or why it is one.
        dequantises: whether `prepare` dequantises the weights, which the note says then.
        batch_invariant: whether the bits of a row do not depend on its batch.
        takes_rounded: path of a function that says whether a norm may round the inputs, as prepared
            weights say; None if it may not.
        takes_plain: whether one expert may be unquantised, as `plain` of prepared weights.
    """
    folder = function.partition(".")[0]

    def supports(query: OpQuery) -> str | None:
        reason = _FOLDERS[folder](query)
        if reason is None and refuses is not None:
            reason = _find(refuses)(query)
        return reason

    load_prepare = None if prepare is None else lambda: _find(prepare)
    if dequantises:
        note = partial(_dequantised, note)
    return Implementation(
        folder,
        supports,
        lambda: _find(function),
        layout,
        load_prepare,
        note,
        dequantises,
        batch_invariant,
        lambda query: takes_rounded is not None and _find(takes_rounded)(query),
        takes_plain,
    )


_invariant = partial(_kernel, batch_invariant=True)


def _dequantised(note: Callable[[OpQuery], str], query: OpQuery) -> str:
    cost = f"dequantised when loaded: {query.dtype.itemsize} bytes a weight"
    return "; ".join(filter(None, (cost, note(query))))


def _one_by_one(_: OpQuery) -> str:
    return "its parts one by one, each as this table says"


def _unrounded(_: OpQuery) -> str:
    return "the norm alone: products round their inputs"


def _wide_product(query: OpQuery) -> str:
    return _find("torch.linear:refuses_logits")(query) or ""


def _find(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(f"atom.model_ops.kernels.{module}"), name)


OPS: dict[str, tuple[Implementation, ...]] = {
    "linear": (
        _kernel(
            "aiter.linear:linear_few_rows",
            "aiter.linear:refuses_few_rows",
            note=lambda query: _find("aiter.linear:note_few_rows")(query),
        ),
        _kernel("aiter.linear:linear", "aiter.linear:refuses"),
        _invariant("native.linear:linear"),
        _invariant("triton.linear:linear", "triton.linear:refuses"),
        _kernel("torch.linear:linear"),
    ),
    "quant_linear": (
        _kernel(
            "aiter.quant_linear:quant_linear",
            "aiter.quant_linear:refuses",
            prepare="aiter.quant_linear:prepare_linear",
            takes_rounded="aiter.quant_linear:takes_rounded",
        ),
        # Of two with the same name, the first supported one is used: codes stay if possible.
        _invariant(
            "native.quant:quant_linear",
            "native.quant_pack:refuses",
            prepare="native.quant_pack:prepare",
        ),
        _invariant(
            "native.quant:dense_linear",
            prepare="torch.quant:prepare_linear",
            dequantises=True,
        ),
        _invariant(
            "triton.quant_linear:quant_linear",
            "triton.quant_linear:refuses",
            prepare="triton.quant_linear:prepare",
            note=lambda query: _find("triton.quant_layout:note")(query),
            takes_rounded="triton.quant_inputs:takes_rounded",
        ),
        _kernel("torch.quant:quant_linear", prepare="torch.quant:prepare_linear", dequantises=True),
    ),
    # aiter's product rounds to the type of the weights first for shapes that it has not tuned.
    "logits": (
        _invariant("native.linear:logits"),
        _invariant("triton.linear:logits", "triton.linear:refuses_logits", note=_wide_product),
        _kernel("torch.linear:logits", "torch.linear:refuses_logits"),
    ),
    # Both read what the one `prepare` of an implementation makes.
    "quant_logits": (
        _invariant(
            "native.quant:quant_logits",
            "native.quant_pack:refuses",
            prepare="native.quant_pack:prepare",
        ),
        _invariant(
            "native.quant:dense_logits",
            prepare="torch.quant:prepare_linear",
            dequantises=True,
        ),
        _invariant(
            "triton.linear:quant_logits",
            "triton.linear:refuses_logits",
            prepare="torch.quant:prepare_linear",
            note=_wide_product,
            dequantises=True,
        ),
        _kernel(
            "torch.quant:quant_logits",
            "torch.linear:refuses_logits",
            prepare="torch.quant:prepare_linear",
            dequantises=True,
        ),
    ),
    "quant_embedding": (
        _invariant("native.quant_embedding:quant_embedding", "native.quant_pack:refuses"),
        _invariant("native.quant:dense_embedding", dequantises=True),
        _invariant("triton.linear:quant_embedding", "triton.linear:refuses"),
        _invariant("torch.quant:quant_embedding"),
    ),
    "rms_norm": (
        _kernel("aiter.elementwise:rms_norm", "aiter.elementwise:refuses_norm"),
        _invariant("native.elementwise:rms_norm"),
        _invariant("triton.rms_norm:rms_norm", "triton.rms_norm:refuses"),
        _kernel("torch.elementwise:rms_norm"),
    ),
    "add_rms_norm": (
        _kernel("aiter.elementwise:add_rms_norm", "aiter.elementwise:refuses_add_norm"),
        _invariant("native.elementwise:add_rms_norm"),
        _invariant("triton.rms_norm:add_rms_norm", "triton.rms_norm:refuses"),
        _kernel("torch.elementwise:add_rms_norm"),
    ),
    "rms_norm_pair": (
        _invariant("triton.rms_norm:rms_norm_pair", "triton.rms_norm:refuses_pair"),
        _invariant("torch.elementwise:rms_norm_pair", note=_one_by_one),
    ),
    "add_rms_norm_quantise": (
        _invariant(
            "triton.norm_quantise:add_rms_norm_quantise", "triton.norm_quantise:refuses_add"
        ),
        _invariant("torch.elementwise:add_rms_norm_quantise", note=_unrounded),
    ),
    "rms_norm_pair_quantise": (
        _invariant(
            "triton.norm_quantise:rms_norm_pair_quantise", "triton.norm_quantise:refuses_pair"
        ),
        _invariant("torch.elementwise:rms_norm_pair_quantise", note=_unrounded),
    ),
    "all_reduce": (
        _kernel("aiter.collectives:all_reduce", "aiter.collectives:refuses_all_reduce"),
        _invariant("torch.collectives:all_reduce"),
    ),
    "all_reduce_add_rms_norm": (
        _kernel("aiter.collectives:all_reduce_add_rms_norm", "aiter.collectives:refuses_add_norm"),
        _invariant("torch.collectives:all_reduce_add_rms_norm"),
    ),
    "silu_and_mul": (
        _kernel("aiter.elementwise:silu_and_mul", "aiter.elementwise:refuses_silu"),
        _invariant("native.elementwise:silu_and_mul"),
        _invariant("triton.activation:silu_and_mul"),
        _kernel("torch.elementwise:silu_and_mul"),
    ),
    "add": (
        _invariant("native.elementwise:add"),
        _invariant("torch.elementwise:add"),
    ),
    "sigmoid": (
        _invariant("native.moe:sigmoid"),
        _invariant("torch.elementwise:sigmoid"),
    ),
    "rope": (
        _kernel("aiter.elementwise:rope", "aiter.elementwise:refuses_rope"),
        _invariant("native.elementwise:rope"),
        _invariant("triton.rope:rope"),
        _invariant("torch.elementwise:rope"),
    ),
    # Of two with the same name, the first supported one is used: packed if possible.
    "kv_cache_write": (
        _kernel("aiter.cache_write:kv_cache_write_packed", "aiter.layout:refuses_packed", PACKED),
        _kernel("aiter.cache_write:kv_cache_write", "aiter.cache_write:refuses_plain"),
        _invariant("native.attention:kv_cache_write", "native.attention:refuses"),
        _invariant("triton.cache_write:kv_cache_write", "triton.support:refuses_storage"),
        _invariant("torch.attention:kv_cache_write"),
    ),
    # Packed if possible. The one of torch calls its parts, whatever the layout is.
    "rope_and_cache": (
        _invariant(
            "triton.rope_cache:rope_and_cache_packed", "triton.rope_cache:refuses_packed", PACKED
        ),
        _invariant("triton.rope_cache:rope_and_cache", "triton.rope_cache:refuses"),
        _invariant(
            "torch.attention:rope_and_cache",
            "aiter.layout:refuses_packed",
            PACKED,
            note=_one_by_one,
        ),
        _invariant("torch.attention:rope_and_cache", note=_one_by_one),
    ),
    "paged_attention": (
        _kernel("aiter.attention:paged_attention_packed", "aiter.layout:refuses_packed", PACKED),
        _kernel("aiter.attention:paged_attention", "aiter.attention:refuses_decode"),
        _kernel("gluon.paged_attention:paged_attention", "gluon.paged_attention:refuses"),
        _invariant("native.attention:paged_attention", "native.attention:refuses"),
        _kernel("triton.paged_attention:paged_attention", "triton.flash:refuses"),
        _invariant("triton.invariant_attention:paged_attention", "triton.flash:refuses"),
        _kernel("torch.attention:paged_attention"),
    ),
    "block_attention": (
        _invariant("native.attention:block_attention", "native.attention:refuses"),
        _kernel("triton.paged_attention:block_attention", "triton.flash:refuses"),
        _invariant("triton.invariant_attention:block_attention", "triton.flash:refuses"),
        _kernel("torch.attention:block_attention"),
    ),
    "prefill_attention": (
        _kernel("aiter.attention:prefill_attention_packed", "aiter.layout:refuses_packed", PACKED),
        _kernel("aiter.attention:prefill_attention", "aiter.attention:refuses_prefill"),
        _invariant("native.attention:paged_attention", "native.attention:refuses"),
        _kernel("triton.prefill_attention:prefill_attention", "triton.flash:refuses"),
        _invariant("triton.invariant_attention:prefill_attention", "triton.flash:refuses"),
        _kernel("torch.attention:paged_attention"),
    ),
    "mla_cache_write": (
        _kernel("aiter.cache_write:mla_cache_write", "aiter.cache_write:refuses_latent"),
        _invariant("native.mla:mla_cache_write", "native.mla:refuses_storage"),
        _invariant("triton.mla_cache_write:mla_cache_write", "triton.support:refuses_storage"),
        _invariant("torch.mla:mla_cache_write"),
    ),
    "mla_rope_and_cache": (
        _invariant("triton.mla_rope_cache:mla_rope_and_cache", "triton.mla_rope_cache:refuses"),
        _invariant("torch.mla:mla_rope_and_cache", note=_one_by_one),
    ),
    "mla_write_and_decode": (
        _kernel("aiter.mla:mla_write_and_decode", "aiter.mla:refuses_write_and_decode"),
        _invariant("torch.mla:mla_write_and_decode", note=_one_by_one),
    ),
    "mla_decode": (
        _kernel("aiter.mla:mla_decode", "aiter.mla:refuses_decode"),
        _kernel("flash_mla.decode:mla_decode", "flash_mla.decode:refuses"),
        _invariant("native.mla:mla_attention", "native.mla:refuses"),
        _kernel("triton.mla_decode:mla_decode", "triton.mla_decode:refuses"),
        _invariant("triton.invariant_mla:mla_decode", "triton.mla_decode:refuses"),
        _kernel("torch.mla:mla_attention"),
    ),
    "mla_prefill": (
        _kernel("aiter.mla:mla_prefill", "aiter.mla:refuses_prefill"),
        _invariant("native.mla:mla_attention", "native.mla:refuses"),
        _kernel("triton.mla_prefill:mla_prefill", "triton.mla_decode:refuses"),
        _invariant("triton.invariant_mla:mla_prefill", "triton.mla_decode:refuses"),
        _kernel("torch.mla:mla_attention"),
    ),
    "moe_route": (
        _kernel("aiter.moe:moe_route", "aiter.moe:refuses_route"),
        _invariant("native.moe:moe_route", "native.moe:refuses_route"),
        _invariant("triton.moe_route:moe_route", "triton.moe_route:refuses"),
        _kernel("torch.moe:moe_route"),
    ),
    "moe_experts": (
        _kernel(
            "aiter.moe:moe_experts",
            "aiter.moe:refuses_experts",
            prepare="aiter.moe:prepare_experts",
        ),
        _invariant("native.moe:moe_experts"),
        _kernel("triton.moe_experts:moe_experts", "triton.moe_align:refuses"),
        _invariant("triton.invariant_experts:moe_experts", "triton.moe_align:refuses"),
        _kernel("torch.moe:moe_experts"),
    ),
    "quant_experts": (
        _kernel(
            "aiter.quant_experts:quant_experts",
            "aiter.quant_experts:refuses",
            prepare="aiter.quant_experts:prepare_experts",
        ),
        _invariant(
            "native.quant_experts:quant_experts",
            "native.quant_experts:refuses",
            prepare="native.quant_experts:prepare",
        ),
        _invariant(
            "native.quant_experts:dense_experts",
            "native.quant_experts:refuses_dense",
            prepare="torch.quant:prepare_experts",
            dequantises=True,
        ),
        _kernel(
            "triton.quant_experts:quant_experts",
            "triton.quant_experts:refuses",
            prepare="triton.quant_experts:prepare",
            note=lambda query: _find("triton.quant_layout:note")(query),
            takes_rounded="triton.quant_inputs:takes_rounded",
            takes_plain=True,
        ),
        _invariant(
            "triton.invariant_experts:quant_experts",
            "triton.quant_experts:refuses",
            prepare="triton.quant_experts:prepare",
            note=lambda query: _find("triton.quant_layout:note")(query),
            takes_rounded="triton.quant_inputs:takes_rounded",
            takes_plain=True,
        ),
        _kernel(
            "torch.quant:quant_experts", prepare="torch.quant:prepare_experts", dequantises=True
        ),
    ),
    "embedding": (
        _invariant("native.gather:embedding"),
        _invariant("torch.gather:embedding"),
    ),
    "argmax": (
        _invariant("native.sampling:argmax"),
        _invariant("torch.sampling:argmax"),
    ),
    "sampling_options": (
        _invariant("native.gather:sampling_options"),
        _invariant("torch.gather:sampling_options"),
    ),
    "choose_tokens": (
        _invariant("native.sampling:choose_tokens"),
        _invariant("triton.choose_tokens:choose_tokens", "triton.choose_tokens:refuses"),
        _kernel("torch.sampling:choose_tokens"),
    ),
    "choose_drafts": (
        _invariant("native.sampling:choose_drafts"),
        _invariant("triton.choose_drafts:choose_drafts", "triton.choose_tokens:refuses"),
        _kernel("torch.draft_choice:choose_drafts"),
    ),
    "mask_tokens": (
        _invariant("native.sampling:mask_tokens"),
        _invariant("triton.mask_tokens:mask_tokens"),
        _invariant("torch.sampling:mask_tokens"),
    ),
    "verify_drafts": (
        _invariant("native.speculation:verify_drafts"),
        _invariant("torch.speculation:verify_drafts"),
    ),
    "place_samples": (
        _invariant("native.speculation:place_samples"),
        _invariant("torch.speculation:place_samples"),
    ),
    "advance_drafts": (
        _invariant("native.speculation:advance_drafts"),
        _invariant("torch.speculation:advance_drafts"),
    ),
    "place_blocks": (
        _invariant("native.speculation:place_blocks"),
        _invariant("torch.speculation:place_blocks"),
    ),
    "take_carried": (
        _invariant("triton.carried:take_carried"),
        _invariant("torch.carried:take_carried"),
    ),
    "leave_carried": (
        _invariant("triton.carried:leave_carried"),
        _invariant("torch.carried:leave_carried"),
    ),
}
