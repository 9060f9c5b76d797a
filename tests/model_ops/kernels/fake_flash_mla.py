"""A stand-in for FlashMLA that checks how it is called, records it, and computes in plain torch.

Signatures are those of its main branch of 2026-04-29; checks are those of its dense decode, which
know nothing of the adapter. Any deviation raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from fake_aiter_kernels import attend

from atom.model_ops.kernels.probe import Library

T = TypeVar("T")

_VECTOR_BYTES = 16


class DeviationError(AssertionError):
    """FlashMLA was called as its signatures or its limits do not allow."""


@dataclass
class Plan:
    """Empty until the first call; then for these sizes and lengths alone."""

    sizes: tuple[Any, ...] | None = None
    lengths: torch.Tensor | None = None


@dataclass(frozen=True)
class Call:
    """Attributes:
    q_shape: [B, queries, heads, 576].
    planned: whether this call made the plan.
    """

    q_shape: tuple[int, ...]
    planned: bool


class FakeFlashMLA:
    """Attributes:
    calls: what was called, in order.
    """

    def __init__(self, *extra_dtypes: torch.dtype, missing: tuple[str, ...] = ()) -> None:
        """Args:
        extra_dtypes: that it takes beside bfloat16 and float16.
        missing: functions that this FlashMLA does not have.
        """
        self.calls: list[Call] = []
        self._extra_dtypes = frozenset(extra_dtypes)
        self._functions = {
            function.__name__: function
            for function in (self.get_mla_metadata, self.flash_mla_with_kvcache)
            if function.__name__ not in missing
        }

    @property
    def library(self) -> Library:
        return Library(self._load, self._extra_dtypes)

    def _load(self, module: str) -> Mapping[str, Any]:
        if module != "flash_mla":
            raise ModuleNotFoundError(f"No module named {module!r}")
        return self._functions

    def get_mla_metadata(self, *args: Any, **kwargs: Any) -> tuple[Plan, None]:
        """Takes anything, as the one of 2025 was called, and looks at none of it."""
        require(not args and not kwargs, "a plan is made of nothing")
        return Plan(), None

    def flash_mla_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor | None,
        cache_seqlens: torch.Tensor | None,
        head_dim_v: int,
        tile_scheduler_metadata: Plan,
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool = False,
        indices: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        extra_k_cache: torch.Tensor | None = None,
        extra_indices_in_kvcache: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
        extra_topk_length: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sparse = indices, attn_sink, extra_k_cache, extra_indices_in_kvcache
        others = *sparse, topk_length, extra_topk_length
        require(all(x is None for x in others), "dense attention")
        require(num_splits is None and not is_fp8_kvcache, "the new interface, in 16 bits")
        tables = given(block_table, "block_table")
        lengths = given(cache_seqlens, "cache_seqlens")
        scale = given(softmax_scale, "softmax_scale")  # else that of 576 dimensions
        self._check(q, k_cache, tables, lengths, head_dim_v)
        planned = self._plan(tile_scheduler_metadata, q, k_cache, lengths, causal)
        self.calls.append(Call(tuple(q.shape), planned))
        out = q.new_zeros(*q.shape[:3], head_dim_v)
        for b, length in enumerate(lengths.tolist()):
            blocks = tables[b, : -(-length // 64)].long()
            require(bool(((blocks >= 0) & (blocks < len(k_cache))).all()), "the pool's blocks")
            rows = visible_rows(q.shape[1], length, causal)
            if length:
                latents = k_cache[blocks].flatten(0, 1)[:length]
                out[b, rows] = attend(q[b, rows], latents, latents[..., :head_dim_v], scale, 0)
        return out, q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)

    def _check(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        head_dim_v: int,
    ) -> None:
        require(q.dim() == 4 and q.shape[3] == 576 and head_dim_v == 512, "q is [B, L, H, 576]")
        require(q.dtype in {torch.bfloat16, torch.float16} | self._extra_dtypes, "16 bits")
        require(k_cache.dtype == q.dtype, "one type")
        require(
            k_cache.dim() == 4 and k_cache.shape[1:] == (64, 1, 576), "blocks are [N, 64, 1, 576]"
        )
        require(block_table.dtype == cache_seqlens.dtype == torch.int32, "int32")
        require(block_table.dim() == 2 and len(block_table) == len(q) > 0, "a table a sequence")
        require(cache_seqlens.shape == (len(q),), "a length a sequence")
        require(cache_seqlens.is_contiguous(), "cache_seqlens is dense")
        require(len({x.device for x in (q, k_cache, block_table, cache_seqlens)}) == 1, "a device")
        for x in (q, k_cache, block_table):
            require(x.stride(-1) == 1, "the last dimension is dense")
        for x in (q, k_cache):  # bulk copies
            steps = [x.data_ptr(), *(x.element_size() * stride for stride in x.stride()[:-1])]
            require(all(step % _VECTOR_BYTES == 0 for step in steps), "rows on 16 bytes")
        longest = 64 * block_table.shape[1]
        require(int(cache_seqlens.max()) <= longest, "lengths within the tables")

    def _plan(
        self,
        plan: Plan,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        cache_seqlens: torch.Tensor,
        causal: bool,
    ) -> bool:
        """Makes the plan, or holds the call against it. Whether it was made."""
        require(isinstance(plan, Plan), "a plan of its own")
        sizes = (*q.shape[:3], *k_cache.shape[1:3], causal)
        if plan.sizes is None or plan.lengths is None:
            plan.sizes, plan.lengths = sizes, cache_seqlens.clone()
            return True
        require(plan.sizes == sizes, "sizes that the plan was made for")
        require(torch.equal(plan.lengths, cache_seqlens), "lengths that the plan was made for")
        return False


def visible_rows(queries: int, length: int, causal: bool) -> slice:
    """Queries that see a key: if causal, those at a position of the context."""
    require(causal or queries == 1, "several queries are masked causally")
    return slice(max(queries - length, 0), queries)


def given(x: T | None, name: str) -> T:
    if x is None:
        raise DeviationError(f"{name} is missing")
    return x


def require(holds: bool, what: str) -> None:
    if not holds:
        raise DeviationError(what)
