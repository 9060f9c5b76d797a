"""aiter's latent attention against float64 references: over the fake, and over aiter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from aiter_cases import (
    BF16,
    MI300X,
    Aiter,
    all_slots,
    as_kept,
    attention,
    batch,
    check,
    random,
    unknown_lengths,
)
from fake_aiter import AITER, FakeAiter
from torch.multiprocessing.reductions import StorageWeakRef

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels import probe
from atom.model_ops.kernels.aiter import mla
from atom.model_ops.kernels.aiter.mla import SplitTables, leave_units_idle, num_splits
from atom.model_ops.kernels.torch.elementwise import rope
from atom.model_ops.kernels.torch.mla import (
    mla_cache_write,
    mla_rope_and_cache,
    mla_write_and_decode,
)
from atom.model_ops.registry import OpTable, OpUnavailableError
from atom.platform import Platform

MLA_OPS = ("mla_cache_write", "mla_decode", "mla_prefill")


@pytest.mark.parametrize(
    ("arch", "heads", "queries", "padded"),
    [
        ("gfx942", 8, 1, 16),
        ("gfx942", 16, 1, 16),
        ("gfx942", 24, 1, 32),
        ("gfx942", 33, 1, 128),
        pytest.param("gfx942", 64, 1, 128, marks=pytest.mark.slow),
        ("gfx942", 64, 2, 64),
        pytest.param("gfx942", 128, 1, 128, marks=pytest.mark.slow),
        ("gfx950", 64, 1, 64),
        ("gfx950", 24, 1, 64),
        ("gfx950", 24, 3, 64),
    ],
)
def test_heads_are_padded_to_a_kernel(arch: str, heads: int, queries: int, padded: int) -> None:
    """gfx942 has none for 64 heads and one query, and gfx950's for 32 is not joined rightly."""
    fake = FakeAiter(arch=arch)
    with probe.replaced(fake.library):
        aiter = Aiter(OpTable(Platform("rocm", arch, True), AITER), torch.device("cpu"), fake)
        made = latents(aiter, heads, [queries] * 2, [40, 7])
        arguments = made.q, made.cache, made.up_proj, made.metadata, 0.1
        for attend in (made.decode, made.prefill):
            check(attend(*arguments), made.wanted, 2**-5)
    (call,) = [call for call in fake.calls if call.name == "mla_decode_fwd"]
    assert call.arguments["q"].shape[1] == padded


def test_the_fake_frees_its_split_tables_as_aiter_does() -> None:
    fake = FakeAiter()
    before = StorageWeakRef(fake.split_table(None, 2, 40, 16)[1].untyped_storage())
    for tokens in range(41, 41 + 127):
        fake.split_table(None, 2, tokens, 16)
    assert not before.expired()
    fake.split_table(None, 2, 41 + 127, 16)
    assert before.expired()


def test_split_tables_outlive_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured decode got is there, and the same, after eager ones of any other length."""
    # Interpreted, the kernel before aiter's takes a second each time.
    monkeypatch.setattr(mla, "absorb", lambda q, *_: torch.zeros(*q.shape[:2], 576, dtype=BF16))
    fake = FakeAiter()
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 16, "num_heads": 16}
    with probe.replaced(fake.library):
        ops = OpTable(MI300X, AITER)
        decode = ops.resolve("mla_decode", BF16, BF16, **sizes, block_size=16, num_blocks=19)
        aiter = Aiter(ops, torch.device("cpu"), fake)
        cache = LatentCacheTensor(random(aiter, 19, 16, 576))
        up_proj, q = random(aiter, 16, 20, 512), random(aiter, 2, 16, 68)

        def table(context_len: int) -> tuple[StorageWeakRef, int, list[int]]:
            """Of one decode: its memory, where it is, and what is in it."""
            fake.calls.clear()
            decode(q, cache, up_proj, batch(aiter, [1, 1], [context_len, 7], 16, 9), 0.1)
            passed = fake.calls.pop().arguments["num_kv_splits_indptr"]
            return StorageWeakRef(passed.untyped_storage()), passed.data_ptr(), passed.tolist()

        captured, place, numbers = table(5)
        for context_len in range(8, 138):
            table(context_len)
        assert not captured.expired()
        assert table(5)[1:] == (place, numbers)
        assert fake.split_table.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("programs", "max_context_len", "splits"),
    [(1, 4096, 16), (64, 8192, 14), (256, 8192, 13), (304, 8192, 1), (1, 1000, 3), (1, 10, 1)],
)
def test_splits_fill_the_device(programs: int, max_context_len: int, splits: int) -> None:
    tables = SplitTables()
    device = torch.device("cpu")
    assert num_splits(programs, max_context_len, 304) == splits
    table = tables.table(programs, splits, device)
    assert table.tolist() == [i * splits for i in range(programs + 1)]
    assert tables.table(programs, splits, device).data_ptr() == table.data_ptr()


def test_units_are_idle_where_more_splits_would_be_worth_it() -> None:
    found = [leave_units_idle(n, context, 304) for context in (4351, 4352) for n in (1, 18, 19)]
    assert found == [False, False, False, True, True, False]


@pytest.mark.parametrize(
    ("arch", "heads", "queries", "sequences", "context", "lists"),
    [
        ("gfx942", 8, 1, 1, 6000, True),
        ("gfx942", 8, 4, 2, 6000, True),
        ("gfx942", 8, 8, 1, 6000, False),  # lists take up to 4 queries
        ("gfx942", 8, 1, 1, 4000, False),  # 16 splits of 256 tokens
        ("gfx942", 24, 1, 1, 6000, False),  # it would run for every 16 heads in turn
        ("gfx950", 8, 4, 1, 6000, True),
        pytest.param("gfx950", 64, 4, 1, 6000, True, marks=pytest.mark.slow),
        ("gfx950", 64, 4, 4, 4400, False),  # a program has 64 rows: 16 programs
    ],
)
def test_few_sequences_use_more_units(
    arch: str, heads: int, queries: int, sequences: int, context: int, lists: bool
) -> None:
    """Where 16 splits of every context leave units idle, units share out the contexts."""
    fake = FakeAiter(arch=arch)
    with probe.replaced(fake.library):
        aiter = Aiter(OpTable(Platform("rocm", arch, True), AITER), torch.device("cpu"), fake)
        contexts = [context, *[queries + 60] * (sequences - 1)]
        made = latents(aiter, heads, [queries] * sequences, contexts, 64)
        out = made.decode(made.q, made.cache, made.up_proj, made.metadata, 0.1)
    check(out, made.wanted, 2**-5)
    (call,) = [call.arguments for call in fake.calls if call.name == "mla_decode_fwd"]
    assert (call["work_indptr"] is not None) == lists
    if lists:
        work = call["work_info_set"][: int(call["work_indptr"][-1])]
        parts = work[:, 0].bincount().tolist()
        assert parts[0] > 16
        assert parts[1:] == [1] * (sequences - 1)
        assert all(end - start >= 64 for start, end in work[:-1, 4:6].tolist())


def test_a_table_for_more_sequences_leaves_the_smaller_one_alone() -> None:
    tables = SplitTables()
    device = torch.device("cpu")
    small = tables.table(3, 1, device)
    where = StorageWeakRef(small.untyped_storage())
    del small
    assert tables.table(5000, 1, device).tolist() == list(range(5001))
    assert not where.expired()


@pytest.mark.parametrize(
    ("query_lens", "passes"),
    [
        ([1, 1, 1], 1),
        ([3, 3, 3], 1),
        ([7, 7, 7], 1),  # aiter reads the latents once for up to 8 queries of 8 heads
        ([16, 16], 2),
        ([13], 0),  # Triton twice, aiter 13 times
        ([1, 5, 2], 0),
        ([30, 7, 70], 0),
    ],
)
def test_mla(aiter: Aiter, query_lens: list[int], passes: int) -> None:
    check_mla(aiter, 8, query_lens, [40, 17, 90][: len(query_lens)])
    decoded = ["mla_decode_fwd"] if passes else []
    aiter.called("concat_and_cache_mla", "flash_attn_varlen_func", *decoded)
    if aiter.fake is not None:
        calls = [call.arguments for call in aiter.fake.calls if call.name == "mla_decode_fwd"]
        given = {(len(call["kv_last_page_lens"]), call["max_seqlen_q"]) for call in calls}
        count, length = len(query_lens) * passes, query_lens[0]
        assert given == ({(count, length // passes)} if passes else set())


def test_queries_of_many_heads_are_read_four_at_a_time(aiter: Aiter) -> None:
    check_mla(aiter, 24, [8, 8], [40, 17])
    check_mla(aiter, 128, [3, 3], [40, 17])


def test_padding_in_parts_of_a_sequence(aiter: Aiter) -> None:
    """Queries that are not there, and whose latents are not numbers, change no other."""
    made = latents(aiter, 8, [16, 16], [40, 17])
    padding = torch.tensor([9, 3], dtype=torch.int32, device=aiter.device)
    slots = made.metadata.slot_mapping.view(2, 16)
    for lost, own in zip(padding.tolist(), slots, strict=True):
        made.cache.latent.flatten(0, 1)[own[16 - lost :]] = torch.nan
    metadata = dataclasses.replace(made.metadata, padding_lens=padding)
    out = made.decode(made.q, made.cache, made.up_proj, metadata, 0.1).view(2, 16, -1)
    wanted = made.wanted.view(2, 16, -1)
    for lost, got, all_of in zip(padding.tolist(), out, wanted, strict=True):
        check(got[: 16 - lost], all_of[: 16 - lost], 2**-5)


@dataclass(frozen=True)
class Latents:
    """A layer with latents, its cache, and what attention over it is."""

    metadata: AttentionMetadata
    cache: LatentCacheTensor
    decode: Any
    prefill: Any
    q: torch.Tensor
    up_proj: torch.Tensor
    wanted: torch.Tensor


def check_mla(
    aiter: Aiter,
    heads: int,
    query_lens: list[int],
    context_lens: list[int],
    block_size: int = 16,
    storage: torch.dtype = BF16,
) -> None:
    made = latents(aiter, heads, query_lens, context_lens, block_size, storage)
    arguments = made.q, made.cache, made.up_proj
    if max(query_lens) <= 16:
        for each in (made.metadata, unknown_lengths(made.metadata)):
            check(made.decode(*arguments, each, 0.1), made.wanted, 2**-5)
    check(made.prefill(*arguments, made.metadata, 0.1), made.wanted, 2**-5)


def latents(
    aiter: Aiter,
    heads: int,
    query_lens: list[int],
    context_lens: list[int],
    block_size: int = 16,
    storage: torch.dtype = BF16,
) -> Latents:
    """Writes the new tokens and checks that they are there: as they are, or about so in 8 bits."""
    nope, v_dim = 32, 16
    width = -(-max(context_lens) // block_size)
    metadata = batch(aiter, query_lens, context_lens, block_size, width)
    pool = random(aiter, len(query_lens) * width + 1, block_size, 576, seed=1)
    scale = None if storage == BF16 else torch.tensor([0.05], device=aiter.device)
    cache = LatentCacheTensor((pool / (1.0 if scale is None else scale)).to(storage), scale)
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": v_dim, "num_heads": heads}
    sizes |= {"block_size": block_size, "num_blocks": len(pool)}
    write, decode, prefill = aiter.ops.resolve_together(MLA_OPS, BF16, storage, **sizes)
    count = len(metadata.slot_mapping)
    latent, k_rope = random(aiter, count, 512, seed=2), random(aiter, count, 96, seed=3)[:, :64]
    write(latent, k_rope, cache, metadata.slot_mapping)
    kept = numbers_of(cache)
    written, new = kept[metadata.slot_mapping], torch.cat((latent, k_rope), dim=-1)
    if scale is None:
        assert torch.equal(written, new.double())
    else:
        check(written, as_kept(new, storage, scale), 2**-3)
    up_proj = random(aiter, heads, nope + v_dim, 512, seed=4) * 512**-0.5
    q = random(aiter, count, heads, nope + 64, seed=5)
    rows = []
    for slots in all_slots(metadata, block_size):
        tokens = kept[slots]
        both = torch.einsum("cr,hnr->chn", tokens[:, :512], up_proj.double())
        shared = tokens[:, None, 512:].expand(-1, heads, -1)
        rows.append((torch.cat((both[..., :nope], shared), dim=-1), both[..., nope:]))
    wanted = attention(q, rows, metadata, 0.1)
    return Latents(metadata, cache, decode, prefill, q, up_proj, wanted)


def numbers_of(cache: LatentCacheTensor) -> torch.Tensor:
    """[slots, 576] float64."""
    stored = cache.latent.flatten(0, 1).double()
    return stored if cache.scale is None else stored * cache.scale


@pytest.mark.parametrize(
    ("query_lens", "bits"),
    [([1, 1, 1], 16), ([5, 5, 5], 16), ([1, 1, 1], 8), ([4, 4, 4], 8)],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_what_comes_before_a_decode_is_one_kernel(
    aiter: Aiter, query_lens: list[int], interleaved: bool, bits: int
) -> None:
    """The cache and the result are those of rotation, cache write and decode."""
    storage = BF16 if bits == 16 else aiter.ops.platform.fp8_dtype
    made = latents(aiter, 8, query_lens, [40, 17, 90], storage=storage)
    tokens, heads = made.q.shape[:2]
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 16, "num_heads": heads}
    sizes |= {"block_size": 16, "num_blocks": len(made.cache.latent)}
    step = aiter.ops.resolve("mla_write_and_decode", BF16, storage, **sizes)
    angles = random(aiter, 64, 32, seed=6).float()
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.arange(tokens, device=aiter.device)
    latent, k_rope = random(aiter, tokens, 512, seed=7), random(aiter, tokens, 96, seed=8)[:, :64]
    given = positions, made.q, latent, k_rope, table, interleaved

    def never(*_: object) -> torch.Tensor:
        pytest.fail("it is one kernel")

    caches = made.cache, LatentCacheTensor(made.cache.latent.clone(), made.cache.scale)
    out = step(*given, caches[0], made.up_proj, made.metadata, 0.1, never, never)
    rotate = partial(mla_rope_and_cache, rope=rope, write=mla_cache_write)
    arguments = caches[1], made.up_proj, made.metadata, 0.1
    wanted = mla_write_and_decode(*given, *arguments, rotate, made.decode)
    written = made.metadata.slot_mapping
    ours, theirs = (numbers_of(cache)[written].float() for cache in caches)
    torch.testing.assert_close(ours, theirs, rtol=2**-3 if bits == 8 else 1e-6, atol=1e-5)
    check(out, wanted.double(), 2**-5)


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("MLA_DECODE", "torch", "does the work of mla_decode, and ATOM_OP_MLA_DECODE=torch"),
        ("ROPE", "torch", "does the work of rope, and ATOM_OP_ROPE=torch"),
        ("MLA_ROPE_AND_CACHE", "torch", "mla_rope_and_cache, and ATOM_OP_MLA_ROPE_AND_CACHE=torch"),
    ],
)
def test_one_kernel_steps_back_where_a_part_is_demanded(
    aiter: Aiter, variable: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ATOM_OP_{variable}", value)
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 16, "num_heads": 8}
    sizes |= {"block_size": 16, "num_blocks": 4}
    with pytest.raises(OpUnavailableError, match=reason):
        aiter.ops.resolve("mla_write_and_decode", BF16, BF16, **sizes)


def test_prefill_of_unknown_lengths_is_an_error(aiter: Aiter) -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 16, "num_heads": 8}
    sizes |= {"block_size": 16, "num_blocks": 4}
    prefill = aiter.ops.resolve("mla_prefill", BF16, BF16, **sizes)
    metadata = unknown_lengths(batch(aiter, [20], [20], 16, 2))
    cache = LatentCacheTensor(random(aiter, 4, 16, 576))
    with pytest.raises(ValueError, match="the host must know the context lengths"):
        prefill(random(aiter, 20, 8, 96), cache, random(aiter, 8, 48, 512), metadata, 0.1)
