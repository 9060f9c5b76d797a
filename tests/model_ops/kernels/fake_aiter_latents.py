"""Latent decode of the fake aiter: of bfloat16 by splits or lists of work, of 8 bits by lists."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fake_aiter import Check

# What the assembly kernels know on each architecture.
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
UNITS = {"gfx942": 304, "gfx950": 256}
LISTS = ("work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


def get_gfx(check: Check) -> str:
    return check.library.told_arch


def get_cu_num(check: Check) -> int:
    return UNITS[check.library.arch]


def split_table(splits: int | None, sequences: int, *_: int) -> tuple[int, torch.Tensor]:
    """As aiter makes it for each total number of tokens, if a call brings none."""
    splits = splits or 16
    return splits, torch.arange(0, (sequences + 1) * splits, splits, dtype=torch.int32)


def part_of(
    q: torch.Tensor, latents: torch.Tensor, scale: float, following: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [L, H, 576] over latents [C, 576], behind which the sequence has `following` more.

    Returns:
        float64: [L, H, 512], and the logarithms of sums of weights [L, H].
    """
    latents = latents.double()
    scores = torch.einsum("lhd,cd->lhc", q.double(), latents) * scale
    last = len(latents) + following - len(q) + torch.arange(len(q))
    hidden = torch.arange(len(latents)) > last[:, None]
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    return scores.softmax(dim=-1) @ latents[:, :512], scores.logsumexp(dim=-1)


def mla_decode_fwd(check: Check) -> tuple[None, None]:
    q, out = check.activation("q", "T H 576"), check.activation("o", "T H 512")
    fp8 = FP8[check.library.arch]
    pool = check.tensor("kv_buffer", "S 1 1 576", q.dtype, fp8)
    starts, key_starts = (check.integers(n, "N1") for n in ("qo_indptr", "kv_indptr"))
    check.integers("kv_indices", "C")
    pages = check.integers("kv_last_page_lens", "N")
    length, count = check.value("max_seqlen_q"), check.sizes["N"]
    check.that(pool.numel() * pool.itemsize <= 2**32 - 16, "latents within 4 GiB")
    check.that(starts.tolist() == [i * length for i in range(count + 1)], "equally many queries")
    check.that(check.sizes["T"] == count * length, "all queries")
    check.that(check.value("page_size") == 1 and bool((pages == 1).all()), "a token a page")
    check.that(check.value("nhead_kv") == 1, "one KV head")
    check.that(int(key_starts[-1]) <= check.sizes["C"], "an index for each token")
    by_lists = pool.dtype == fp8 or check.value("work_meta_data") is not None
    (_by_lists if by_lists else _by_splits)(check, q, pool, out)
    return None, None


def _by_splits(check: Check, q: torch.Tensor, pool: torch.Tensor, out: torch.Tensor) -> None:
    heads, length, count = check.sizes["H"], check.value("max_seqlen_q"), check.sizes["N"]
    slots, key_starts = check.value("kv_indices"), check.value("kv_indptr")
    check.that(heads in (16, 32, 64, 128), "heads that it is compiled for")
    has_kernel = (heads, length, check.library.arch) != (64, 1, "gfx942")
    check.that(has_kernel, "no kernel for 64 heads and one query on gfx942")
    check.that(length <= (8 if heads == 16 else 4), "at most so many queries")
    splits, table = check.value("num_kv_splits"), check.value("num_kv_splits_indptr")
    if splits is None or table is None:
        splits, table = check.library.split_table(splits, count, len(slots), heads)
    else:
        check.integers("num_kv_splits_indptr", "N1")
    check.that(splits >= 1 and table.tolist() == [i * splits for i in range(count + 1)], "splits")
    joins_all = splits == 1 or (heads, check.library.arch) != (32, "gfx950")
    check.that(joins_all, "joins splits that the kernel for 32 heads of gfx950 does not write")
    for b in range(count):
        rows = slice(b * length, (b + 1) * length)
        latents = pool[slots[key_starts[b] : key_starts[b + 1]].long(), 0, 0]
        out[rows] = part_of(q[rows], latents, check.value("sm_scale"), 0)[0].to(out.dtype)


def _by_lists(check: Check, q: torch.Tensor, pool: torch.Tensor, out: torch.Tensor) -> None:
    """The only way of `a16w8`, for latents in 8 bits and bfloat16 queries of 16 heads."""
    in_8_bits = pool.dtype != q.dtype
    _takes_lists(check, in_8_bits, check.sizes["H"], check.value("max_seqlen_q"))
    check.that(check.value("num_kv_splits_indptr") is None, "no splits beside lists of work")
    check.that(check.value("num_kv_splits") >= 1, "as the lists were made with")
    work_starts = check.integers("work_indptr", "U1")
    work = check.integers("work_info_set", "W 8")
    joins = check.integers("reduce_indptr", "N1")
    finals = check.integers("reduce_final_map", "N 2")
    partials = check.integers("reduce_partial_map", "P")
    pointers = check.tensor("work_meta_data", "2", torch.uint64)
    check.that(check.sizes["U1"] == UNITS[check.library.arch] + 1, "work for each unit")
    addresses = [work_starts.data_ptr(), work.data_ptr()]
    check.that(pointers.tolist() == addresses, "addresses of lists that are still there")
    slots, scale = check.value("kv_indices"), check.value("sm_scale")
    real = check.scale("kv_scale") if in_8_bits else 1.0
    check.that(in_8_bits or check.value("kv_scale") is None, "no scale of bfloat16")
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for _, place, first, end, key, last, following, _ in work[: int(work_starts[-1])].tolist():
        latents = pool.view(torch.uint8)[slots[key:last].long(), 0, 0].view(pool.dtype)
        found = part_of(q[first:end], latents.float() * real, scale, following)
        if place < 0:
            out[first:end] = found[0].to(out.dtype)
        else:
            kept[place] = found
    for b, (first, end) in enumerate(finals.tolist()):
        parts = [kept[place] for place in partials[joins[b] : joins[b + 1]].tolist()]
        if parts:
            weights = torch.stack([sums for _, sums in parts]).softmax(dim=0)
            joined = weights[..., None] * torch.stack([values for values, _ in parts])
            out[first:end] = joined.sum(dim=0).to(out.dtype)


def get_mla_metadata_info_v1(check: Check) -> tuple[tuple[Any, torch.dtype], ...]:
    """Shapes for units that take all queries of a sequence: a tile is a sequence."""
    _knows_types(check, "q_dtype", "kv_dtype", check.value("num_head_qo"), "max_seqlen_qo")
    check.that(check.value("is_sparse") is False, "all tokens are read")
    count, most = check.value("batch_size"), check.value("max_split_per_batch")
    units = UNITS[check.library.arch]
    parts = min(count + units - 1, 2 * (units - 1))
    parts = max(parts, count + min(units, most * count)) if most > 0 else parts
    shapes = (2, units + 1, (count + units - 1, 8), count + 1, (count, 2), parts)
    return tuple((s, torch.int32 if i else torch.uint64) for i, s in enumerate(shapes))


def get_mla_metadata_v1(check: Check) -> None:
    """Lists that split every context alike. The last part has a token for each query at least, or
    the first of them would see none of it.
    """
    starts, key_starts = (check.integers(f"seqlens_{x}_indptr", "N1") for x in ("qo", "kv"))
    check.integers("kv_last_page_lens", "N")
    heads = check.value("num_heads_per_head_k")
    _knows_types(check, "dtype_q_nope", "dtype_kv_nope", heads, "max_seqlen_qo")
    check.that(check.value("num_heads_k") == 1 and check.value("is_causal") is True, "causal")
    check.that(check.value("page_size") == 1, "a token a page")
    length, step = check.value("uni_seqlen_qo"), check.value("kv_granularity")
    check.that(check.value("max_seqlen_qo") == length >= 1, "equally many queries")
    check.that(starts.diff().unique().tolist() == [length], "equally many queries")
    check.that(step % 32 == 0 and step.bit_count() == 1, "tiles of all kernels")
    count, units = check.sizes["N"], UNITS[check.library.arch]
    most = check.value("max_split_per_batch")
    budget = units if most < 0 else min(units, most * count)
    work: list[list[int]] = []
    joins, partials = [0], []
    for b, (key, last) in enumerate(pairwise(key_starts.tolist())):
        each = step * -(-(last - key) // (step * max(1, budget // count)))
        ends = [end for end in range(key + each, last, each) if last - end >= length]
        for first, end in zip([key, *ends], [*ends, last], strict=True):
            place = len(partials) * length if ends else -1
            partials += [place] if ends else []
            rows = [b * length, (b + 1) * length]
            work.append([b, place, *rows, first, end, last - end, 0])
        joins.append(len(partials))
    per_unit = -(-len(work) // units)
    bounds = [min(unit * per_unit, len(work)) for unit in range(units + 1)]
    finals = [[b * length, (b + 1) * length] for b in range(count)]
    lists = dict(zip(LISTS, (bounds, work, joins, finals, partials), strict=True))
    for name, numbers in lists.items():
        shape = {"work_info_set": "W 8", "reduce_final_map": "N 2"}.get(name, f"any_{name}")
        into = check.integers(name, shape)
        check.that(len(numbers) <= len(into), "room for the list")
        into.fill_(-1)[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
    pointers = check.tensor("work_metadata_ptrs", "2", torch.uint64)
    addresses = [check.value(name).data_ptr() for name in LISTS[:2]]
    pointers.copy_(torch.tensor(addresses, dtype=torch.uint64))


def _knows_types(check: Check, queries: str, latents: str, heads: int, length: str) -> None:
    kept = check.value(latents)
    check.that(check.value(queries) in check.activations, "queries of more than 8 bits")
    in_8_bits = kept != check.value(queries)
    check.that(not in_8_bits or kept == FP8[check.library.arch], "latents in the arch's 8 bits")
    _takes_lists(check, in_8_bits, heads, check.value(length))


def _takes_lists(check: Check, in_8_bits: bool, heads: int, length: int) -> None:
    """gfx950 also has such kernels for bfloat16 and more heads."""
    has_all = check.library.arch == "gfx950" and not in_8_bits
    check.that(heads in ((16, 32, 64, 128) if has_all else (16,)), "heads that take lists")
    check.that(1 <= length <= 4, "a tile has all queries")


KERNELS: dict[str, Callable[[Any], Any]] = {
    kernel.__name__: kernel
    for kernel in (
        get_gfx,
        get_cu_num,
        mla_decode_fwd,
        get_mla_metadata_info_v1,
        get_mla_metadata_v1,
    )
}
