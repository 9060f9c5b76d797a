"""When the kernels over a latent cache can run; imports Triton only when one is chosen."""

from __future__ import annotations

from atom.model_ops.kernels.torch.mla import LatentAttentionOp, LatentWriteOp
from atom.model_ops.kernels.triton.attention import refuses_storage
from atom.model_ops.registry import OpQuery

_LARGEST_RANK = 512
_LARGEST_ROPE = 64


def refuses(query: OpQuery) -> str | None:
    """Why latent attention cannot be computed; None when it can."""
    # A tile of keys, this wide, has to fit into the memory that a compute unit shares.
    for name, largest in (("kv_lora_rank", _LARGEST_RANK), ("qk_rope_head_dim", _LARGEST_ROPE)):
        if query.shape[name] > largest:
            return f"{name}={query.shape[name]} is larger than {largest}"
    return refuses_storage(query)


def load_mla_decode() -> LatentAttentionOp:
    from atom.model_ops.kernels.triton.mla_decode import mla_decode

    return mla_decode


def load_mla_prefill() -> LatentAttentionOp:
    from atom.model_ops.kernels.triton.mla_prefill import mla_prefill

    return mla_prefill


def load_mla_cache_write() -> LatentWriteOp:
    from atom.model_ops.kernels.triton.mla_cache_write import mla_cache_write

    return mla_cache_write
