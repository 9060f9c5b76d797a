"""All ops and their implementations, one line each. `registry.preference` has their order."""

from __future__ import annotations

from atom.model_ops.op_table.op_lines import (
    find,
    invariant,
    kernel,
    one_by_one,
    unrounded,
    wide_product,
)
from atom.model_ops.registry import PACKED, Implementation

OPS: dict[str, tuple[Implementation, ...]] = {
    "linear": (
        kernel(
            "aiter.linear:linear_few_rows",
            "aiter.linear:refuses_few_rows",
            note=lambda query: find("aiter.linear:note_few_rows")(query),
            into="aiter.linear:linear_few_rows_into",
        ),
        kernel(
            "aiter.linear:linear",
            "aiter.linear:refuses",
            note=lambda query: find("aiter.linear:note")(query),
        ),
        invariant("native.linear:linear", into="native.linear:linear_into"),
        invariant("triton.products.linear:linear", "triton.products.linear:refuses"),
        kernel("torch.linear:linear"),
    ),
    "quant_linear": (
        kernel(
            "aiter.quant_linear:quant_linear",
            "aiter.quant_linear:refuses",
            prepare="aiter.quant_linear:prepare_linear",
            takes_rounded="aiter.quant_linear:takes_rounded",
        ),
        # Of two with the same name, the first supported one is used: codes stay if possible.
        invariant(
            "native.quant.linear:quant_linear",
            "native.quant.pack:refuses",
            prepare="native.quant.pack:prepare",
            into="native.quant.linear:quant_linear_into",
        ),
        invariant(
            "native.quant.linear:dense_linear",
            prepare="torch.quant:prepare_linear",
            dequantises=True,
        ),
        invariant(
            "triton.products.quant_linear:quant_linear",
            "triton.products.quant_linear:refuses",
            prepare="triton.products.quant_linear:prepare",
            note=lambda query: find("triton.products.quant_layout:note")(query),
            takes_rounded="triton.products.quant_inputs:takes_rounded",
        ),
        kernel("torch.quant:quant_linear", prepare="torch.quant:prepare_linear", dequantises=True),
    ),
    # aiter's product rounds to the type of the weights first for shapes that it has not tuned.
    "logits": (
        invariant("native.linear:logits"),
        invariant(
            "triton.products.linear:logits",
            "triton.products.linear:refuses_logits",
            note=wide_product,
        ),
        kernel("torch.linear:logits", "torch.linear:refuses_logits"),
    ),
    # Both read what the one `prepare` of an implementation makes.
    "quant_logits": (
        invariant(
            "native.quant.linear:quant_logits",
            "native.quant.pack:refuses",
            prepare="native.quant.pack:prepare",
        ),
        invariant(
            "native.quant.linear:dense_logits",
            prepare="torch.quant:prepare_linear",
            dequantises=True,
        ),
        invariant(
            "triton.products.linear:quant_logits",
            "triton.products.linear:refuses_logits",
            prepare="torch.quant:prepare_linear",
            note=wide_product,
            dequantises=True,
        ),
        kernel(
            "torch.quant:quant_logits",
            "torch.linear:refuses_logits",
            prepare="torch.quant:prepare_linear",
            dequantises=True,
        ),
    ),
    "quant_embedding": (
        invariant("native.quant.embedding:quant_embedding", "native.quant.pack:refuses"),
        invariant("native.quant.linear:dense_embedding", dequantises=True),
        invariant("triton.products.linear:quant_embedding", "triton.products.linear:refuses"),
        invariant("torch.quant:quant_embedding"),
    ),
    "rms_norm": (
        kernel("aiter.elementwise:rms_norm", "aiter.elementwise:refuses_norm"),
        invariant("native.elementwise:rms_norm"),
        invariant("triton.rms_norm:rms_norm", "triton.rms_norm:refuses"),
        kernel("torch.elementwise:rms_norm"),
    ),
    "add_rms_norm": (
        kernel("aiter.elementwise:add_rms_norm", "aiter.elementwise:refuses_add_norm"),
        invariant("native.elementwise:add_rms_norm"),
        invariant("triton.rms_norm:add_rms_norm", "triton.rms_norm:refuses"),
        kernel("torch.elementwise:add_rms_norm"),
    ),
    "layer_norm": (
        invariant("native.elementwise:layer_norm"),
        invariant("torch.elementwise:layer_norm"),
    ),
    "rms_norm_pair": (
        invariant("triton.rms_norm:rms_norm_pair", "triton.rms_norm:refuses_pair"),
        invariant("torch.elementwise:rms_norm_pair", note=one_by_one),
    ),
    "rms_norm_beside": (
        invariant("triton.rms_norm:rms_norm_beside", "triton.rms_norm:refuses_pair"),
        invariant("torch.elementwise:rms_norm_beside", note=one_by_one),
    ),
    "add_rms_norm_quantise": (
        invariant(
            "triton.products.norm_quantise:add_rms_norm_quantise",
            "triton.products.norm_quantise:refuses_add",
        ),
        invariant("torch.elementwise:add_rms_norm_quantise", note=unrounded),
    ),
    "rms_norm_pair_quantise": (
        invariant(
            "triton.products.norm_quantise:rms_norm_pair_quantise",
            "triton.products.norm_quantise:refuses_pair",
        ),
        invariant("torch.elementwise:rms_norm_pair_quantise", note=unrounded),
    ),
    "all_reduce": (
        kernel("aiter.collectives:all_reduce", "aiter.collectives:refuses_all_reduce"),
        invariant("torch.collectives:all_reduce"),
    ),
    "all_reduce_add_rms_norm": (
        kernel(
            "aiter.collectives:all_reduce_add_rms_norm",
            "aiter.collectives:refuses_add_norm",
            staging="aiter.collectives:staging",
        ),
        invariant("torch.collectives:all_reduce_add_rms_norm"),
    ),
    "silu_and_mul": (
        kernel("aiter.elementwise:silu_and_mul", "aiter.elementwise:refuses_silu"),
        invariant("native.elementwise:silu_and_mul"),
        invariant("triton.activation:silu_and_mul"),
        kernel("torch.elementwise:silu_and_mul"),
    ),
    "gelu_and_mul": (
        invariant("native.elementwise:gelu_and_mul"),
        invariant("torch.elementwise:gelu_and_mul"),
    ),
    "situ_and_mul": (
        invariant("native.elementwise:situ_and_mul"),
        invariant("triton.activation:situ_and_mul"),
        invariant("torch.elementwise:situ_and_mul"),
    ),
    "mix_residuals": (
        invariant("native.elementwise:mix_residuals"),
        invariant("triton.activation:mix_residuals", "triton.activation:refuses_mix"),
        invariant("torch.elementwise:mix_residuals"),
    ),
    "scale": (
        invariant("native.elementwise:scale"),
        invariant("torch.elementwise:scale"),
    ),
    "softcap": (
        invariant("native.elementwise:softcap"),
        invariant("torch.elementwise:softcap"),
    ),
    "mul_sigmoid": (
        invariant("native.elementwise:mul_sigmoid"),
        invariant("torch.elementwise:mul_sigmoid"),
    ),
    "scale_by_position": (
        invariant("native.elementwise:scale_by_position"),
        invariant("torch.elementwise:scale_by_position"),
    ),
    "add": (
        invariant("native.elementwise:add"),
        invariant("torch.elementwise:add"),
    ),
    "sigmoid": (
        invariant("native.moe:sigmoid"),
        invariant("torch.elementwise:sigmoid"),
    ),
    "rope": (
        kernel("aiter.elementwise:rope", "aiter.elementwise:refuses_rope"),
        invariant("native.elementwise:rope"),
        invariant("triton.rope:rope"),
        invariant("torch.elementwise:rope"),
    ),
    # Of two with the same name, the first supported one is used: packed if possible.
    "kv_cache_write": (
        kernel("aiter.cache_write:kv_cache_write_packed", "packed_cache:refuses_packed", PACKED),
        kernel("aiter.cache_write:kv_cache_write", "aiter.cache_write:refuses_plain"),
        invariant("native.attention:kv_cache_write", "native.attention:refuses"),
        invariant("triton.attention.cache_write:kv_cache_write", "triton.support:refuses_storage"),
        invariant("torch.attention:kv_cache_write"),
    ),
    # Packed if possible. The one of torch calls its parts, whatever the layout is.
    "rope_and_cache": (
        invariant(
            "triton.attention.rope_cache:rope_and_cache_packed",
            "triton.attention.rope_cache:refuses_packed",
            PACKED,
        ),
        invariant(
            "triton.attention.rope_cache:rope_and_cache", "triton.attention.rope_cache:refuses"
        ),
        invariant(
            "torch.elementwise:rope_and_cache",
            "packed_cache:refuses_packed",
            PACKED,
            note=one_by_one,
        ),
        invariant("torch.elementwise:rope_and_cache", note=one_by_one),
    ),
    "paged_attention": (
        kernel("aiter.attention:paged_attention_packed", "packed_cache:refuses_packed", PACKED),
        kernel("aiter.attention:paged_attention", "aiter.attention:refuses_decode"),
        kernel("gluon.paged_attention:paged_attention", "gluon.paged_attention:refuses"),
        invariant("native.attention:paged_attention", "native.attention:refuses"),
        kernel(
            "triton.attention.paged_attention:paged_attention", "triton.attention.flash:refuses"
        ),
        invariant(
            "triton.attention.invariant_attention:paged_attention", "triton.attention.flash:refuses"
        ),
        kernel("torch.attention:paged_attention"),
    ),
    "block_attention": (
        invariant("native.attention:block_attention", "native.attention:refuses"),
        kernel(
            "triton.attention.paged_attention:block_attention", "triton.attention.flash:refuses"
        ),
        invariant(
            "triton.attention.invariant_attention:block_attention", "triton.attention.flash:refuses"
        ),
        kernel("torch.attention:block_attention"),
    ),
    "prefill_attention": (
        kernel("aiter.attention:prefill_attention_packed", "packed_cache:refuses_packed", PACKED),
        kernel("aiter.attention:prefill_attention", "aiter.attention:refuses_prefill"),
        invariant("native.attention:paged_attention", "native.attention:refuses"),
        kernel(
            "triton.attention.prefill_attention:prefill_attention", "triton.attention.flash:refuses"
        ),
        invariant(
            "triton.attention.invariant_attention:prefill_attention",
            "triton.attention.flash:refuses",
        ),
        kernel("torch.attention:paged_attention"),
    ),
    "mla_cache_write": (
        kernel("aiter.cache_write:mla_cache_write", "aiter.cache_write:refuses_latent"),
        invariant("native.mla:mla_cache_write", "native.mla:refuses_storage"),
        invariant("triton.mla.mla_cache_write:mla_cache_write", "triton.support:refuses_storage"),
        invariant("torch.mla:mla_cache_write"),
    ),
    "mla_rope_and_cache": (
        invariant(
            "triton.mla.mla_rope_cache:mla_rope_and_cache", "triton.mla.mla_rope_cache:refuses"
        ),
        invariant("torch.mla:mla_rope_and_cache", note=one_by_one),
    ),
    "mla_write_and_decode": (
        kernel("aiter.mla:mla_write_and_decode", "aiter.mla:refuses_write_and_decode"),
        invariant("torch.mla:mla_write_and_decode", note=one_by_one),
    ),
    "mla_decode": (
        kernel("aiter.mla:mla_decode", "aiter.mla:refuses_decode"),
        kernel("flash_mla.decode:mla_decode", "flash_mla.decode:refuses"),
        invariant("native.mla:mla_attention", "native.mla:refuses"),
        kernel("triton.mla.mla_decode:mla_decode", "triton.mla.mla_decode:refuses"),
        invariant("triton.mla.invariant_mla:mla_decode", "triton.mla.mla_decode:refuses"),
        kernel("torch.mla:mla_attention"),
    ),
    "mla_block_attention": (
        invariant("native.mla:mla_block_attention", "native.mla:refuses"),
        kernel("triton.mla.mla_decode:mla_block_attention", "triton.mla.mla_decode:refuses"),
        invariant("triton.mla.invariant_mla:mla_block_attention", "triton.mla.mla_decode:refuses"),
        kernel("torch.mla:mla_block_attention"),
    ),
    "mla_prefill": (
        kernel("aiter.mla_prefill:mla_prefill", "aiter.mla_prefill:refuses"),
        invariant("native.mla:mla_attention", "native.mla:refuses"),
        kernel("triton.mla.mla_prefill:mla_prefill", "triton.mla.mla_decode:refuses"),
        invariant("triton.mla.invariant_mla:mla_prefill", "triton.mla.mla_decode:refuses"),
        kernel("torch.mla:mla_attention"),
    ),
    # Latents in blocks of one token, and one query per sequence.
    "mla_sparse": (
        invariant("native.mla:mla_attention", "native.mla:refuses"),
        kernel("triton.mla.mla_decode:mla_decode", "triton.mla.mla_decode:refuses"),
        invariant("triton.mla.invariant_mla:mla_decode", "triton.mla.mla_decode:refuses"),
        kernel("torch.index_topk:mla_sparse"),
    ),
    "index_topk": (
        invariant("native.index_topk:index_topk", "native.index_topk:refuses"),
        invariant("triton.mla.index_topk:index_topk", "triton.mla.index_topk:refuses"),
        kernel("torch.index_topk:index_topk"),
    ),
    "index_cache_write": (
        invariant("native.mla:mla_cache_write", "native.index_topk:refuses"),
        invariant("triton.mla.mla_cache_write:mla_cache_write", "triton.support:refuses_storage"),
        invariant("torch.mla:mla_cache_write"),
    ),
    "moe_route": (
        kernel("aiter.moe:moe_route", "aiter.moe:refuses_route"),
        invariant("native.moe:moe_route", "native.moe:refuses_route"),
        invariant("triton.products.moe_route:moe_route", "triton.products.moe_route:refuses"),
        kernel("torch.moe:moe_route"),
    ),
    "moe_experts": (
        kernel(
            "aiter.moe:moe_experts",
            "aiter.moe:refuses_experts",
            prepare="aiter.moe:prepare_experts",
            note=lambda query: find("aiter.moe:note_experts")(query),
        ),
        invariant("native.moe:moe_experts"),
        kernel(
            "triton.products.moe_experts:moe_experts",
            "triton.products.moe_experts:refuses",
            into="triton.products.moe_experts:moe_experts_into",
        ),
        invariant(
            "triton.products.invariant_experts:moe_experts", "triton.products.moe_experts:refuses"
        ),
        kernel("torch.moe:moe_experts"),
    ),
    "quant_experts": (
        kernel(
            "aiter.quant_experts:quant_experts",
            "aiter.quant_experts:refuses",
            prepare="aiter.quant_experts:prepare_experts",
            note=lambda query: find("aiter.quant_experts:note")(query),
        ),
        invariant(
            "native.quant.experts:quant_experts",
            "native.quant.experts:refuses",
            prepare="native.quant.experts:prepare",
            takes_mixed=True,
        ),
        invariant(
            "native.quant.experts:dense_experts",
            "native.quant.experts:refuses_dense",
            prepare="torch.quant:prepare_experts",
            dequantises=True,
        ),
        kernel(
            "triton.products.quant_experts:quant_experts",
            "triton.products.quant_experts:refuses",
            prepare="triton.products.quant_experts:prepare",
            note=lambda query: find("triton.products.quant_layout:note")(query),
            takes_rounded="triton.products.quant_inputs:takes_rounded",
            takes_plain=True,
            into="triton.products.quant_experts:quant_experts_into",
        ),
        invariant(
            "triton.products.invariant_experts:quant_experts",
            "triton.products.quant_experts:refuses",
            prepare="triton.products.quant_experts:prepare",
            note=lambda query: find("triton.products.quant_layout:note")(query),
            takes_rounded="triton.products.quant_inputs:takes_rounded",
            takes_plain=True,
        ),
        kernel(
            "torch.quant:quant_experts", prepare="torch.quant:prepare_experts", dequantises=True
        ),
    ),
    "causal_conv": (
        invariant("native.recurrent:causal_conv"),
        invariant("triton.recurrent:causal_conv"),
        invariant("torch.recurrent:causal_conv"),
    ),
    "delta_gates": (
        invariant("native.recurrent:delta_gates"),
        invariant("triton.recurrent:delta_gates"),
        invariant("torch.recurrent:delta_gates"),
    ),
    "delta_rule": (
        invariant("native.recurrent:delta_rule"),
        kernel("triton.delta_chunks:delta_rule", "triton.delta_chunks:refuses"),
        invariant("triton.recurrent:delta_rule", "triton.recurrent:refuses_delta"),
        invariant("torch.recurrent:delta_rule"),
    ),
    "gated_rms_norm": (
        invariant("native.recurrent:gated_rms_norm"),
        invariant("triton.recurrent:gated_rms_norm"),
        invariant("torch.recurrent:gated_rms_norm"),
    ),
    "embedding": (
        invariant("native.gather:embedding"),
        invariant("torch.gather:embedding"),
    ),
    "share_embedding": (
        invariant("triton.gather:share_embedding", "triton.gather:refuses_share"),
        invariant("torch.gather:share_embedding", note=one_by_one),
    ),
    "window_places": (
        invariant("native.gather:window_places"),
        invariant("torch.gather:window_places"),
    ),
    "mrope_table": (
        invariant("native.gather:mrope_table"),
        invariant("torch.gather:mrope_table"),
    ),
    "take_inputs": (
        invariant("triton.gather:take_inputs"),
        invariant("torch.gather:take_inputs"),
    ),
    "argmax": (
        invariant("native.sampling:argmax"),
        invariant("triton.sampling.argmax:argmax", "triton.sampling.argmax:refuses"),
        invariant("torch.sampling:argmax"),
    ),
    "largest_pair": (
        invariant("triton.sampling.argmax:largest_pair", "triton.sampling.argmax:refuses"),
        invariant("torch.sampling:largest_pair"),
    ),
    "largest_of_pairs": (
        invariant("triton.sampling.argmax:largest_of_pairs"),
        invariant("torch.sampling:largest_of_pairs"),
    ),
    "sampling_options": (
        invariant("native.gather:sampling_options"),
        invariant("triton.gather:sampling_options"),
        invariant("torch.gather:sampling_options"),
    ),
    "choose_tokens": (
        invariant("native.sampling:choose_tokens"),
        invariant(
            "triton.sampling.choose_tokens:choose_tokens", "triton.sampling.choose_tokens:refuses"
        ),
        kernel("torch.sampling:choose_tokens"),
    ),
    "choose_drafts": (
        invariant("native.sampling:choose_drafts"),
        invariant(
            "triton.sampling.choose_drafts:choose_drafts", "triton.sampling.choose_tokens:refuses"
        ),
        kernel("torch.draft_choice:choose_drafts"),
    ),
    "mask_tokens": (
        invariant("native.sampling:mask_tokens"),
        invariant("triton.sampling.mask_tokens:mask_tokens"),
        invariant("torch.sampling:mask_tokens"),
    ),
    "verify_drafts": (
        invariant("native.speculation:verify_drafts"),
        invariant("triton.sampling.speculation:verify_drafts"),
        invariant("torch.speculation:verify_drafts"),
    ),
    "place_samples": (
        invariant("native.speculation:place_samples"),
        invariant("triton.sampling.speculation:place_samples"),
        invariant("torch.speculation:place_samples"),
    ),
    "place_drafts": (
        invariant("native.speculation:place_drafts"),
        invariant("triton.sampling.speculation:place_drafts"),
        invariant("torch.speculation:place_drafts"),
    ),
    "take_carried": (
        invariant("triton.sampling.carried:take_carried"),
        invariant("torch.carried:take_carried"),
    ),
    "leave_carried": (
        invariant("triton.sampling.carried:leave_carried"),
        invariant("torch.carried:leave_carried"),
    ),
}
