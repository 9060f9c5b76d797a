"""The choice of tokens that sparse attention attends to, and attention to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_ops.batches import Part, attention_metadata

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.torch import index_topk as torch_index
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpTable, OpUnavailableError, preference
from atom.platform import cpu_platform, current_platform

HEADS, SIZE, BLOCK, NUM_BLOCKS, TOPK = 5, 16, 4, 70, 7
# Queries behind how many tokens: below, at and above as many as are chosen, and prompts.
PARTS = [(1, 40), (3, 5), (1, 6), (1, 7), (10, 0), (2, 139)]
SHAPE = {
    "index_n_heads": HEADS,
    "index_head_dim": SIZE,
    "num_heads": 3,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "block_size": BLOCK,
    "num_blocks": NUM_BLOCKS,
}
IMPLEMENTATIONS = ("native", "triton", "torch")


def resolve(op: str, name: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    platform = cpu_platform() if device.type == "cpu" else current_platform()
    if name not in preference(platform):
        pytest.skip(f"{platform.kind} ({platform.arch}) has no {name}")
    own = tuple(entry for entry in OPS[op] if entry.name == name)
    try:
        found: Callable[..., Any] = OpTable(platform, {op: own}).resolve(op, dtype, dtype, **SHAPE)
    except OpUnavailableError as error:
        pytest.skip(str(error))
    return found


def batch(device: torch.device, parts: list[tuple[int, int]] = PARTS) -> AttentionMetadata:
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    made = []
    for queries, start in parts:
        count = -(-(queries + start) // BLOCK)
        made.append(Part(queries, start, [order.pop() for _ in range(count)]))
    return attention_metadata(made, BLOCK, device)


def whole_numbers(*shape: int, most: int = 2, seed: int = 0) -> torch.Tensor:
    """So that scores are exact, and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def rows_of(metadata: AttentionMetadata) -> list[tuple[int, int]]:
    """The sequence of each query, and how many tokens it sees."""
    lens, contexts = metadata.query_lens_cpu, metadata.context_lens.tolist()
    return [
        (s, contexts[s] - length + 1 + i) for s, length in enumerate(lens) for i in range(length)
    ]


def slots_of(metadata: AttentionMetadata, sequence: int, positions: list[int]) -> list[int]:
    table = metadata.block_tables[sequence].tolist()
    return [table[p // BLOCK] * BLOCK + p % BLOCK for p in positions]


def expected(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, metadata: AttentionMetadata
) -> list[list[int]]:
    """The slots that each query chooses, in plain Python."""
    flat, found = keys.flatten(0, 1).double().cpu(), []
    for t, (sequence, seen) in enumerate(rows_of(metadata)):
        slots = slots_of(metadata, sequence, list(range(seen)))
        products = (q[t].double().cpu() @ flat[slots].T).relu()
        scores = (weights[t].double().cpu() @ products).tolist()
        scores = [float("-inf") if score != score else score for score in scores]
        best = sorted(range(seen), key=lambda s: (-scores[s], s))[:TOPK]
        found.append([slots[s] for s in sorted(best)])
    return found


def check(
    choose: Callable[..., Any],
    keys: torch.Tensor,
    metadata: AttentionMetadata,
    q: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    device = metadata.block_tables.device
    given = q.to(device), weights.to(device), LatentCacheTensor(keys.to(device))
    slots, counts, starts = choose(*given, metadata, TOPK)
    wanted = expected(q, weights, keys, metadata)
    assert counts.tolist() == [len(row) for row in wanted]
    rows = [row[:count] for row, count in zip(slots.tolist(), counts.tolist(), strict=True)]
    assert rows == wanted
    assert bool((slots[counts[:, None] <= torch.arange(slots.shape[1], device=device)] == -1).all())
    assert starts.tolist() == list(range(len(q) + 1))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_scores_the_first_are_chosen(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    choose, metadata = resolve("index_topk", name, device, dtype), batch(device)
    total = sum(metadata.query_lens_cpu)
    keys = whole_numbers(NUM_BLOCKS, BLOCK, SIZE).to(dtype)
    q, weights = whole_numbers(total, HEADS, SIZE, seed=1).to(dtype), whole_numbers(total, HEADS)
    check(choose, keys, metadata, q, weights)
    check(choose, keys, replace(metadata, context_lens_cpu=None), q, weights)
    check(choose, torch.zeros_like(keys), metadata, q, weights)  # all scores are 0
    check(choose, keys, metadata, q, -weights.abs())


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_what_is_nobodys_is_not_read_and_scores_may_be_nan(name: str, device: torch.device) -> None:
    choose, metadata = resolve("index_topk", name, device, torch.float32), batch(device)
    total = sum(metadata.query_lens_cpu)
    q, weights = whole_numbers(total, HEADS, SIZE, seed=1), whole_numbers(total, HEADS)
    keys = whole_numbers(NUM_BLOCKS, BLOCK, SIZE)
    flat = keys.flatten(0, 1)
    held = [slots_of(metadata, s, list(range(seen))) for s, seen in rows_of(metadata)]
    others = torch.ones(len(flat), dtype=torch.bool)
    others[sorted({slot for slots in held for slot in slots})] = False
    flat[others] = float("nan")
    check(choose, keys, metadata, q, weights)
    weights[0] = float("nan")  # all scores of a query
    check(choose, keys, metadata, q, weights)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_queries_choose_alone_as_they_do_together(name: str, device: torch.device) -> None:
    """With numbers as they come: a prompt at once, in parts, and token by token."""
    choose = resolve("index_topk", name, device, torch.float32)
    generator = torch.Generator().manual_seed(5)
    context = 37
    keys = torch.randn(NUM_BLOCKS, BLOCK, SIZE, generator=generator).to(device)
    q = torch.randn(context, HEADS, SIZE, generator=generator).to(device)
    weights = torch.randn(context, HEADS, generator=generator).to(device)
    blocks = list(range(10))

    def run(begin: int, end: int) -> torch.Tensor:
        metadata = attention_metadata([Part(end - begin, begin, blocks)], BLOCK, device)
        found: torch.Tensor
        found, _, _ = choose(
            q[begin:end], weights[begin:end], LatentCacheTensor(keys), metadata, TOPK
        )
        return torch.nn.functional.pad(found, (0, TOPK - found.shape[1]), value=-1)

    whole = run(0, context)
    for sizes in ([1] * context, [16, 5, 16], [30, 7]):
        begin, parts = 0, []
        for size in sizes:
            parts.append(run(begin, begin + size))
            begin += size
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_padding_of_a_graph_sees_no_padding(name: str, device: torch.device) -> None:
    choose = resolve("index_topk", name, device, torch.float32)
    metadata = batch(device, [(4, 9), (4, 20)])
    padding = torch.tensor([1, 2], dtype=torch.int32, device=device)
    q, weights = whole_numbers(8, HEADS, SIZE).to(device), whole_numbers(8, HEADS).to(device)
    keys = LatentCacheTensor(whole_numbers(NUM_BLOCKS, BLOCK, SIZE, seed=2).to(device))
    slots, counts, _ = choose(q, weights, keys, replace(metadata, padding_lens=padding), 30)
    assert counts.tolist() == [10, 11, 12, 12, 21, 22, 22, 22]
    assert slots[7].tolist()[:22] == slots_of(metadata, 1, list(range(22)))


def test_many_scores_are_computed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = batch(torch.device("cpu"))
    total = sum(metadata.query_lens_cpu)
    keys = whole_numbers(NUM_BLOCKS, BLOCK, SIZE)
    given = keys, metadata, whole_numbers(total, HEADS, SIZE, seed=1), whole_numbers(total, HEADS)
    monkeypatch.setattr(torch_index, "_MOST_NUMBERS", 300)
    check(torch_index.index_topk, *given)
    triton = pytest.importorskip("atom.model_ops.kernels.triton.mla.index_topk")
    monkeypatch.setattr(triton, "_MOST_SCORES", 500)
    check(triton.index_topk, *given)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_keys_are_written_where_they_are_read(name: str, device: torch.device) -> None:
    write = resolve("index_cache_write", name, device, torch.float32)
    metadata = batch(device, [(5, 3)])
    keys = torch.zeros(NUM_BLOCKS, BLOCK, SIZE, device=device)
    rows = whole_numbers(5, SIZE).to(device)
    slots = metadata.slot_mapping.clone()
    slots[2] = -1
    write(rows[:, :8], rows[:, 8:], LatentCacheTensor(keys), slots)
    flat = keys.flatten(0, 1)
    real = [0, 1, 3, 4]
    assert torch.equal(flat[slots[real]], rows[real])
    if device.type == "cpu":  # elsewhere the last slot is nobody's
        assert int((flat != 0).any(-1).sum()) == int((rows[real] != 0).any(-1).sum())


def attention_case(device: torch.device, seed: int = 0) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(queries for queries, _ in PARTS)
    q = torch.randn(total, 3, 20, generator=generator).to(device)
    latent = torch.randn(NUM_BLOCKS, BLOCK, 40, generator=generator).to(device)
    up_proj = (torch.randn(3, 24, 32, generator=generator) / 6).to(device)
    return q, latent, up_proj


def chosen(slots: torch.Tensor, counts: torch.Tensor, starts: torch.Tensor) -> AttentionMetadata:
    return AttentionMetadata(
        counts, slots, counts, counts, starts, 1, slots.shape[1], (1,) * len(counts), None
    )


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("topk", [TOPK, 150])
def test_attention_to_the_chosen_tokens(
    name: str, topk: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a softmax over them alone; to all tokens, as attention that is not sparse."""
    monkeypatch.setattr(torch_index, "_MOST_NUMBERS", 20_000)  # some queries at a time
    attend, metadata = resolve("mla_sparse", name, device, torch.float32), batch(device)
    q, latent, up_proj = attention_case(device)
    weights, keys = whole_numbers(len(q), HEADS), whole_numbers(NUM_BLOCKS, BLOCK, SIZE)
    queries = whole_numbers(len(q), HEADS, SIZE, seed=4)
    given = queries.to(device), weights.to(device), LatentCacheTensor(keys.to(device))
    pages = chosen(*torch_index.index_topk(*given, metadata, topk))
    rows = LatentCacheTensor(latent.flatten(0, 1)[:, None])
    found = attend(q, rows, up_proj, pages, 0.3)
    for t, count in enumerate(pages.context_lens.tolist()):
        seen = latent.flatten(0, 1)[pages.block_tables[t, :count].long()].double()
        up, query = up_proj.double(), q[t].double()
        scores = torch.einsum("hn,hnr,cr->hc", query[:, :12], up[:, :12], seen[:, :32])
        scores += query[:, 12:] @ seen[:, 32:].T
        values = torch.einsum("hvr,cr->hcv", up[:, 12:], seen[:, :32])
        wanted = torch.einsum("hc,hcv->hv", (scores * 0.3).softmax(-1), values)
        torch.testing.assert_close(found[t].double(), wanted, atol=1e-5, rtol=1e-5)
    if topk > TOPK and name == "native":
        dense = resolve("mla_decode", name, device, torch.float32)
        assert torch.equal(dense(q, LatentCacheTensor(latent), up_proj, metadata, 0.3), found)


@pytest.mark.skipif(native_build().reason is not None, reason="needs the native kernels")
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("size", [16, 24])
def test_native_scores_of_long_contexts(block_size: int, size: int) -> None:
    """Of several chunks, in place or copied, with sizes that fill no vector; and threads."""
    generator = torch.Generator().manual_seed(7)
    context, topk, heads = 1500, 300, 9
    keys = torch.randn(context // block_size + 1, block_size, size, generator=generator)
    q = torch.randn(3, heads, size, generator=generator)
    weights = torch.randn(3, heads, generator=generator)
    blocks = torch.randperm(len(keys), generator=generator).tolist()
    metadata = attention_metadata([Part(3, context - 3, blocks)], block_size, torch.device("cpu"))
    given = q, weights, LatentCacheTensor(keys), metadata, topk
    choose = resolve("index_topk", "native", torch.device("cpu"), torch.float32)
    found, wanted = choose(*given), torch_index.index_topk(*given)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
