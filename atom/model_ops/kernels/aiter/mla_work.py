"""Work lists of aiter's persistent latent decode.

As many programs as the device has compute units each take a share of all contexts together. A
kernel makes the lists from the lengths on the device, once a step: all layers share them. So it
does not matter how far a captured graph's bound of the context is from the contexts.
"""

from __future__ import annotations

from typing import Any

import torch

from atom.model_ops.kernels.probe import EntryPoint, function

_LIST = EntryPoint(
    "aiter.ops.attention:get_mla_metadata_v1",
    "seqlens_qo_indptr seqlens_kv_indptr kv_last_page_lens num_heads_per_head_k num_heads_k "
    "is_causal work_metadata_ptrs work_info_set work_indptr reduce_indptr reduce_final_map "
    "reduce_partial_map",
    "page_size kv_granularity max_seqlen_qo uni_seqlen_qo max_split_per_batch dtype_q_nope "
    "dtype_kv_nope",
)
_SIZES = EntryPoint(
    "aiter.ops.attention:get_mla_metadata_info_v1",
    "batch_size max_seqlen_qo num_head_qo q_dtype kv_dtype is_sparse",
    "max_split_per_batch",
)
WORK = _LIST, _SIZES

# Most queries of a sequence that all its kernels take.
MOST_QUERIES = 4
# A context is split at multiples of so many tokens, the fewest of a part. All kernels' tiles of
# keys divide it.
_GRANULARITY = 64
# Most parts of a context, on average over the batch, and the fewest tokens of the longest that are
# worth one: every part leaves its result in float32, and a query's are joined one after another.
_MAX_SPLITS = 64
_SPLIT_TOKENS = 256


def list_work(
    query_starts: torch.Tensor,
    starts: torch.Tensor,
    last_lens: torch.Tensor,
    queries: int,
    num_heads: int,
    max_context_len: int,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> dict[str, Any]:
    """Arguments of `mla_decode_fwd` for N sequences of `queries` each, whose pages are one token.

    The lists are tensors of their own, and one holds the addresses of two others: whoever launches
    the decode keeps all of them. No host sync. Assumes that every part of a context has a token
    that the first query of its sequence may see, since the kernel gives NaN for none.

    Args:
        query_starts, starts: [N + 1] int32, offsets of each sequence's queries and pages.
        last_lens: [N] int32, tokens of the last page.
        num_heads: of the queries that the kernel gets.
        dtypes: of queries and latents.
    """
    splits = min(_MAX_SPLITS, max(1, max_context_len // _SPLIT_TOKENS))
    sizes = function(_SIZES)(
        len(last_lens), queries, num_heads, *dtypes, False, max_split_per_batch=splits
    )
    pointers, work_starts, work, *joins = (
        torch.empty(shape, dtype=dtype, device=starts.device) for shape, dtype in sizes
    )
    function(_LIST)(
        query_starts,
        starts,
        last_lens,
        num_heads,
        1,
        True,
        pointers,
        work,
        work_starts,
        *joins,
        page_size=1,
        kv_granularity=_GRANULARITY,
        max_seqlen_qo=queries,
        uni_seqlen_qo=queries,
        max_split_per_batch=splits,
        dtype_q_nope=dtypes[0],
        dtype_kv_nope=dtypes[1],
    )
    names = ("reduce_indptr", "reduce_final_map", "reduce_partial_map")
    lists = {"work_meta_data": pointers, "work_indptr": work_starts, "work_info_set": work}
    return {**lists, **dict(zip(names, joins, strict=True)), "num_kv_splits": splits}
