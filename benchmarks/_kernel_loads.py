"""What kernels.py measures: ops of the table, at sizes of real models, over rotating data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from _bytes import Sizes, mla_attention_bytes, paged_attention_bytes
from _device import num_calls
from _kernel_sizes import HeadSizes, LatentSizes
from _operations import mla_decode_operations, mla_prefill_operations, paged_attention_operations

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor, LatentCacheTensor
from atom.model_ops.attention.mha import Attention
from atom.model_ops.attention.mla import MLAAttention
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpTable, preference
from atom.platform import Platform

# Random numbers of standard deviation 1, times this scale's inverse, reach 200 of the 240 or 448
# that 8 bits hold.
_FP8_SCALE = 0.02
_TOKENS_WRITTEN_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Case:
    """Attributes:
    batch: sequences; of experts and products, tokens.
    context: cached tokens of every sequence; 0 where there is no cache.
    queries: of each sequence: 1, or the rows that verify drafts.
    """

    batch: int
    context: int = 0
    queries: int = 1


@dataclass(frozen=True)
class Calls:
    """Calls of one op on different data, and what one of them must move and compute at least.

    Attributes:
        operations: of products, a multiplication and an addition counted as two.
    """

    calls: Sequence[Callable[[], torch.Tensor]]
    num_bytes: float
    operations: float = 0.0


class Load(Protocol):
    """One op at the sizes of one layer.

    Attributes:
        op, sizes: what is measured, for reports.
        storage: how the KV cache is stored; None without one.
    """

    op: str
    sizes: str
    storage: torch.dtype | None

    def refusal(self, case: Case) -> str | None:
        """Why a case is left out; None when it can run."""
        ...

    def use(self, implementation: str) -> None:
        """Run the op by this implementation from now on, on a cache that it can read.

        Raises:
            OpUnavailableError: with the reason why it cannot run here.
        """
        ...

    def calls(self, case: Case) -> Calls: ...


class FoundOps(OpTable):
    """An op table with one op restricted to one implementation; remembers what it gave."""

    def __init__(self, platform: Platform, op: str, implementation: str) -> None:
        only = tuple(entry for entry in OPS[op] if entry.name == implementation)
        super().__init__(platform, {**OPS, op: only})
        self.functions: dict[str, Any] = {}

    def resolve(
        self, op: str, dtype: torch.dtype, storage: torch.dtype | None = None, /, **shape: int
    ) -> Any:
        self.functions[op] = super().resolve(op, dtype, storage, **shape)
        return self.functions[op]

    def resolve_together(
        self, ops: tuple[str, ...], dtype: torch.dtype, storage: torch.dtype, /, **shape: int
    ) -> tuple[Any, ...]:
        found = super().resolve_together(ops, dtype, storage, **shape)
        self.functions.update(zip(ops, found, strict=True))
        return found


def implementations(op: str, platform: Platform) -> list[str]:
    """Names of those that the platform prefers, best first."""
    listed = {entry.name for entry in OPS[op]}
    return [name for name in preference(platform) if name in listed]


class _Paged:
    """What both kinds of attention share: a pool of which each call reads other blocks."""

    def __init__(
        self,
        platform: Platform,
        dtype: torch.dtype,
        storage: torch.dtype,
        pool_tokens: int,
        rotated_bytes: int,
        block_size: int,
    ) -> None:
        self.storage: torch.dtype | None = storage
        self._platform, self._dtype = platform, dtype
        self._device = platform.device
        self._rotated_bytes = rotated_bytes
        self._block_size = block_size
        self._blocks = pool_tokens // block_size
        self._element = Sizes(dtype.itemsize, storage.itemsize)
        generator = torch.Generator(self._device).manual_seed(1)
        self._order = torch.randperm(self._blocks, generator=generator, device=self._device).int()

    def refusal(self, case: Case) -> str | None:
        wanted = case.batch * -(-case.context // self._block_size)
        if wanted > self._blocks:
            return f"needs {wanted} blocks of the cache, there is memory for {self._blocks}"
        return None

    def _metadata(self, case: Case, call_bytes: int) -> list[AttentionMetadata]:
        """As inside a graph: the host does not know the lengths. Each on blocks of its own."""
        per_sequence = -(-case.context // self._block_size)
        blocks = case.batch * per_sequence
        count = num_calls(call_bytes, self._blocks // blocks * call_bytes, self._rotated_bytes)
        edges = range(0, (count + 1) * blocks, blocks)
        tables = [self._order[a:b].view(case.batch, per_sequence) for a, b in pairwise(edges)]

        def integers(value: int, dtype: torch.dtype, count: int = case.batch) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=self._device)

        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=self._device)
        starts = starts * case.queries
        return [
            AttentionMetadata(
                slot_mapping=integers(-1, torch.int64, case.batch * case.queries),
                block_tables=table,
                block_counts=integers(per_sequence, torch.int32),
                context_lens=integers(case.context, torch.int32),
                cu_seqlens_q=starts,
                max_seqlen_q=case.queries,
                max_context_len=case.context,
                query_lens_cpu=(case.queries,) * case.batch,
                context_lens_cpu=None,
            )
            for table in tables
        ]

    def _random(self, *shape: int) -> torch.Tensor:
        """The same numbers for the same shape."""
        generator = torch.Generator(self._device).manual_seed(sum(shape))
        return torch.randn(shape, generator=generator, device=self._device).to(self._dtype)

    def _scale(self) -> torch.Tensor | None:
        if self.storage == self._dtype:
            return None
        return torch.full((1,), _FP8_SCALE, device=self._device)

    def _pool(self, *row: int) -> torch.Tensor:
        """With the spare block at the end."""
        shape = (self._blocks + 1, self._block_size, *row)
        return torch.empty(shape, dtype=self.storage, device=self._device)

    def _fill(self, write: Callable[[int, torch.Tensor], None]) -> None:
        """`write` takes a number of tokens and their slots."""
        total = self._blocks * self._block_size
        for first in range(0, total, _TOKENS_WRITTEN_AT_ONCE):
            end = min(first + _TOKENS_WRITTEN_AT_ONCE, total)
            write(end - first, torch.arange(first, end, device=self._device))


class PagedDecode(_Paged):
    """Queries that decode or verify, over keys and values."""

    op = "paged_attention"

    def __init__(self, sizes: HeadSizes, *common: Any) -> None:
        super().__init__(*common)
        self.sizes = str(sizes)
        self._heads = sizes
        rows = sizes.kv_heads, sizes.head_dim
        self._cache = KVCacheTensor(
            self._pool(*rows), self._pool(*rows), self._scale(), self._scale()
        )

    def use(self, implementation: str) -> None:
        h = self._heads
        ops = FoundOps(self._platform, self.op, implementation)
        context = LayerContext(self._dtype, self._device, ops, self._blocks * self._block_size)
        layer = Attention(h.heads, h.kv_heads, h.head_dim, h.head_dim**-0.5, context)
        layer.bind_kv_cache(self._cache)
        self._attend = ops.functions[self.op]
        write = ops.functions["kv_cache_write"]

        def write_some(count: int, slots: torch.Tensor) -> None:
            rows = self._random(2, count, h.kv_heads, h.head_dim)
            write(rows[0], rows[1], self._cache, slots)

        self._fill(write_some)

    def calls(self, case: Case) -> Calls:
        h, attend, cache = self._heads, self._attend, self._cache
        q = self._random(case.batch * case.queries, h.heads, h.head_dim)
        lens = [case.context] * case.batch
        sizes = h.heads, h.kv_heads, h.head_dim
        size = paged_attention_bytes(lens, case.queries, *sizes, self._element)

        def call(metadata: AttentionMetadata) -> Callable[[], torch.Tensor]:
            return lambda: attend(q, cache, metadata, h.head_dim**-0.5, None)

        operations = paged_attention_operations(lens, case.queries, h.heads, h.head_dim)
        return Calls([call(m) for m in self._metadata(case, size)], size, operations)


class LatentDecode(_Paged):
    """The same over latents, into the latent space and back included."""

    op = "mla_decode"
    _operations = staticmethod(mla_decode_operations)

    def __init__(self, sizes: LatentSizes, *common: Any) -> None:
        super().__init__(*common)
        self.sizes = str(sizes)
        self._widths = sizes
        self._cache = LatentCacheTensor(self._pool(sizes.rank + sizes.rope), self._scale())

    def use(self, implementation: str) -> None:
        w = self._widths
        ops = FoundOps(self._platform, self.op, implementation)
        context = LayerContext(self._dtype, self._device, ops, self._blocks * self._block_size)
        layer = MLAAttention(w.heads, w.rank, w.rope, w.v, (w.nope + w.rope) ** -0.5, context)
        layer.bind_kv_cache(self._cache)
        self._attend = ops.functions[self.op]
        write = ops.functions["mla_cache_write"]

        def write_some(count: int, slots: torch.Tensor) -> None:
            rows = self._random(count, w.rank + w.rope)
            write(rows[:, : w.rank], rows[:, w.rank :], self._cache, slots)

        self._fill(write_some)

    def calls(self, case: Case) -> Calls:
        w, attend, cache = self._widths, self._attend, self._cache
        q = self._random(case.batch * case.queries, w.heads, w.nope + w.rope)
        up = self._random(w.heads, w.nope + w.v, w.rank) / w.rank**0.5
        widths = w.heads, w.rank, w.rope, w.nope, w.v
        lens = [case.context] * case.batch
        size = mla_attention_bytes(lens, case.queries, *widths, self._element)

        def call(metadata: AttentionMetadata) -> Callable[[], torch.Tensor]:
            return lambda: attend(q, cache, up, metadata, (w.nope + w.rope) ** -0.5)

        operations = self._operations(lens, case.queries, *widths)
        return Calls([call(m) for m in self._metadata(case, size)], size, operations)


class LatentPrefill(LatentDecode):
    """Prompts over latents, or their last parts: as in a step, whose lengths the host knows."""

    op = "mla_prefill"
    _operations = staticmethod(mla_prefill_operations)

    def _metadata(self, case: Case, call_bytes: int) -> list[AttentionMetadata]:
        lens = (case.context,) * case.batch
        return [
            replace(each, context_lens_cpu=lens, most_context_cpu=lens)
            for each in super()._metadata(case, call_bytes)
        ]


def worst_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest expected number; the share of tokens that differ."""
    if not expected.is_floating_point():
        return float((out != expected).float().mean())
    expected = expected.float()
    return float((out.float() - expected).abs().max() / expected.abs().max())


TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float32: 1e-3,
    torch.bfloat16: 3e-2,
    torch.float16: 1e-2,
}
