"""Every implementation of every op against torch's on a CPU, or float64: on whatever device.

Here runs whatever the op table has for the machine: C++ and interpreted Triton on a CPU; Triton,
Gluon, aiter and torch on a GPU. What cannot run is skipped with the reason that the table gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import op_cases
import pytest
import torch
from aiter_cases import BF16, Aiter, all_slots, attention, check, unknown_lengths
from op_cases import OpCase, tensors, to
from test_aiter import CACHE_OPS, Layer, check_layer, layer
from test_aiter_mla import MLA_OPS, Latents, check_mla, latents

from atom.graphs.capture import CudaGraphBackend, ReexecuteBackend
from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor, LatentCacheTensor
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpTable, OpUnavailableError, preference
from atom.platform import Platform, cpu_platform, current_platform, free_memory_bytes

CASES = op_cases.cases()
# What tests of their own compare, on the device as well.
ELSEWHERE = {
    "quant_linear": "test_triton_quant_linear.py",
    "quant_logits": "test_native_quant.py",
    "quant_embedding": "test_native_quant.py",
    "quant_experts": "test_triton_quant_experts.py",
    "block_attention": "test_triton_attention.py",
    "mla_block_attention": "test_triton_mla.py",
    "rms_norm_pair": "test_triton_elementwise.py",
    "rms_norm_beside": "test_triton_elementwise.py",
    "share_embedding": "test_triton_gather.py",
    "take_inputs": "test_triton_gather.py",
    "add_rms_norm_quantise": "test_triton_norm_quantise.py",
    "rms_norm_pair_quantise": "test_triton_norm_quantise.py",
    "rope_and_cache": "test_triton_rope_cache.py",
    "mla_rope_and_cache": "test_triton_rope_cache.py",
    "mla_write_and_decode": "test_aiter_mla.py",
    "mla_sparse": "test_index_topk.py",
    "index_topk": "test_index_topk.py",
    "index_cache_write": "test_index_topk.py",
    "all_reduce": "test_aiter_collectives.py",
    "all_reduce_add_rms_norm": "test_aiter_collectives.py",
}
# aiter keeps 128 tables of splits and frees the oldest.
EAGER_STEPS = 140
# Its Gluon decode has 16 programs a sequence, each of which takes partitions of 256 tokens.
PARTITION, PROGRAMS = 256, 16
GIB = 2**30
# Of latents, by implementation; 16 if not named.
BLOCK_SIZES = {"flash_mla": 64}


def platform_of(device: torch.device) -> Platform:
    return cpu_platform() if device.type == "cpu" else current_platform()


def names_of(op: str) -> list[str]:
    return list(dict.fromkeys(entry.name for entry in OPS[op]))


def each(*ops: str) -> Any:
    pairs = [(op, name) for op in ops for name in names_of(op)]
    return pytest.mark.parametrize(("op", "name"), pairs, ids=[f"{o}-{n}" for o, n in pairs])


def table_of(op: str, name: str, device: torch.device) -> OpTable:
    """With one implementation of an op; a test without it is skipped."""
    platform = platform_of(device)
    if name not in preference(platform):
        pytest.skip(f"{platform.kind} ({platform.arch}) has no {name}")
    return OpTable(platform, {**OPS, op: tuple(e for e in OPS[op] if e.name == name)})


def available(make: Callable[[], Any]) -> Any:
    """What `make` returns; a test of what is not available is skipped with the reason."""
    try:
        return make()
    except OpUnavailableError as error:
        pytest.skip(str(error).rpartition("}: ")[2] or str(error))


def test_every_op_is_compared() -> None:
    compared = {case.op for case in CASES} | set(ELSEWHERE) | {*CACHE_OPS, *MLA_OPS}
    assert compared == set(OPS)
    assert all((Path(__file__).parent / file).exists() for file in ELSEWHERE.values())


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, id=f"{case.op}-{name}")
        for case in CASES
        for name in names_of(case.op)
    ],
)
def test_agrees_with_torch_on_a_cpu(case: OpCase, name: str, device: torch.device) -> None:
    """What is returned, and what is written to the arguments."""
    table = table_of(case.op, name, device)
    choice = available(lambda: table.resolve_weights(case.op, case.dtype, None, **case.shape))
    given = to_device(case, choice.prepare, device)
    got = choice.function(*given)
    (reference,) = (entry for entry in OPS[case.op] if entry.name == "torch")
    written = to_device(case, None, torch.device("cpu"))
    wanted = reference.load()(*written)
    if case.op == "moe_route":  # in any order
        got, wanted = by_id(*got), by_id(*wanted)
    if case.writes:
        got, wanted = (got, given), (wanted, written)
    pairs = list(zip(tensors(got), tensors(wanted), strict=True))
    assert pairs
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        if case.tolerance:
            check(ours, theirs, case.tolerance)
        else:
            assert torch.equal(ours, theirs)


def to_device(case: OpCase, prepare: Any, device: torch.device) -> tuple[Any, ...]:
    moved = tuple(to(argument, device) for argument in case.arguments)
    if prepare is not None:  # experts
        moved = (moved[0], *prepare(moved[1], moved[2]), *moved[3:])
    return moved


def by_id(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = ids.argsort(dim=1)
    return weights.gather(1, order), ids.gather(1, order).long()


def paged(op: str, name: str, device: torch.device, *sizes: Any, **more: Any) -> Layer:
    aiter = Aiter(table_of(op, name, device), device, None)
    made: Layer = available(lambda: layer(aiter, *sizes, **more))
    return made


def latent(op: str, name: str, device: torch.device, *sizes: Any, bits: int = 16) -> Latents:
    aiter = Aiter(table_of(op, name, device), device, None)
    block_size, storage = BLOCK_SIZES.get(name, 16), storage_of(bits, aiter)
    made: Latents = available(lambda: latents(aiter, *sizes, block_size, storage))
    return made


def storage_of(bits: int, aiter: Aiter) -> torch.dtype:
    return BF16 if bits == 16 else aiter.ops.platform.fp8_dtype


@each(*CACHE_OPS)
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=["grouped", "single"])
def test_paged_attention(op: str, name: str, heads: tuple[int, int], device: torch.device) -> None:
    check_layer(paged(op, name, device, heads, [1, 3], [40, 19]))


@each(*MLA_OPS)
@pytest.mark.parametrize("bits", [16, 8])
def test_latent_attention(op: str, name: str, bits: int, device: torch.device) -> None:
    aiter = Aiter(table_of(op, name, device), device, None)
    block_size, storage = BLOCK_SIZES.get(name, 16), storage_of(bits, aiter)
    for lens in ([1, 3], [2, 2]):
        available(lambda lens=lens: check_mla(aiter, 8, lens, [40, 19], block_size, storage))


@each("paged_attention")
@pytest.mark.parametrize("queries", [1, 4])
def test_contexts_of_whole_partitions(
    op: str, name: str, queries: int, device: torch.device
) -> None:
    """Where splits of a context end within partitions, keys are easily left out."""
    whole = PARTITION * PROGRAMS if device.type != "cpu" else PARTITION
    contexts = [whole, 2 * whole, whole + 1]
    made = paged(op, name, device, (1, 1), [queries] * 3, contexts)
    wanted = attention(made.q, made.rows, made.metadata, 0.1)
    metadata = replace(unknown_lengths(made.metadata), max_context_len=2 * whole)
    check(made.decode(made.q, made.cache, metadata, 0.1, None), wanted)


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    backend = ReexecuteBackend() if device.type == "cpu" else CudaGraphBackend()
    return backend.capture(work)


def short_of(device: torch.device) -> list[int]:
    """Contexts of two sequences; the interpreter is slow."""
    return [20, 17] if device.type == "cpu" else [100, 100]


@each("paged_attention")
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=["grouped", "single"])
def test_graphs_outlive_eager_steps(
    op: str, name: str, heads: tuple[int, int], device: torch.device
) -> None:
    made = paged(op, name, device, heads, [1, 1], short_of(device))

    def decode(metadata: AttentionMetadata) -> torch.Tensor:
        out: torch.Tensor = made.decode(made.q, made.cache, metadata, 0.1, None)
        return out

    check_graph(decode, made.metadata, attention(made.q, made.rows, made.metadata, 0.1))


@each("mla_decode")
@pytest.mark.parametrize("bits", [16, 8])
def test_graphs_outlive_eager_steps_of_latents(
    op: str, name: str, bits: int, device: torch.device
) -> None:
    made = latent(op, name, device, 8, [1, 1], short_of(device), bits=bits)

    def decode(metadata: AttentionMetadata) -> torch.Tensor:
        out: torch.Tensor = made.decode(made.q, made.cache, made.up_proj, metadata, 0.1)
        return out

    check_graph(decode, made.metadata, made.wanted)


def check_graph(
    decode: Callable[[AttentionMetadata], torch.Tensor],
    metadata: AttentionMetadata,
    wanted: torch.Tensor,
) -> None:
    """A captured decode is right after many eager ones, of which each has another total length."""
    device = metadata.context_lens.device
    out = torch.zeros(wanted.shape, dtype=BF16, device=device)
    # Each run has metadata of its own, as in the engine.
    replay = captured(lambda: out.copy_(decode(replace(metadata, context_lens_cpu=None))), device)
    for total in range(2, 4 if device.type == "cpu" else 2 + EAGER_STEPS):
        lens = total // 2, total - total // 2
        there = torch.tensor(lens, dtype=torch.int32, device=device)
        decode(replace(metadata, context_lens=there, context_lens_cpu=lens))
    out.zero_()
    replay()
    check(out, wanted, 2**-5)


def pool(
    blocks: int, row: tuple[int, ...], device: torch.device, block_size: int = 16
) -> torch.Tensor:
    """[blocks, block_size, *row] of zeros; on a CPU pages that nobody touches take no memory."""
    shape = (blocks, block_size, *row)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=BF16, device=device)
    return torch.from_numpy(np.zeros(2 * int(np.prod(shape)), np.uint8)).view(BF16).view(shape)


def in_far_blocks(
    metadata: AttentionMetadata, blocks: int, block_size: int = 16
) -> AttentionMetadata:
    """The same sequences in the last blocks of a pool."""
    first = blocks - 1 - int(metadata.block_tables.max())
    slots = metadata.slot_mapping + first * block_size
    return replace(metadata, block_tables=metadata.block_tables + first, slot_mapping=slots)


def skip_without_memory(device: torch.device) -> None:
    free = free_memory_bytes(platform_of(device)) / GIB
    if device.type != "cpu" and free < 8:
        pytest.skip(f"two pools beyond 2 GiB need 8 GiB of memory, {free:.1f} are free")


@each("kv_cache_write", "paged_attention")
@pytest.mark.parametrize("heads", [(16, 8), (8, 8)], ids=["grouped", "single"])
def test_keys_and_values_beyond_2_gib(
    op: str, name: str, heads: tuple[int, int], device: torch.device
) -> None:
    skip_without_memory(device)
    near = paged(op, name, device, heads, [1, 3], [20, 35])
    blocks = 2 * GIB // (2 * 16 * heads[1] * 128) + 9
    pools = [pool(blocks, (heads[1], 128), device) for _ in range(2)]
    assert min(p.numel() * p.itemsize for p in pools) > 2 * GIB
    cache = KVCacheTensor(*pools)
    table = table_of(op, name, device)
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 128, "block_size": 16}
    more = {"num_blocks": blocks, "sliding_window": 0}
    write, decode, _ = available(
        lambda: table.resolve_together(CACHE_OPS, BF16, BF16, **sizes, **more)
    )
    far = in_far_blocks(near.metadata, blocks)
    slots = torch.cat(all_slots(far, 16))
    key, value = (torch.cat(rows) for rows in zip(*near.rows, strict=True))
    write(key, value, cache, slots)
    wanted = attention(near.q, near.rows, near.metadata, 0.1)
    check(decode(near.q, cache, unknown_lengths(far), 0.1, None), wanted)


@each("mla_cache_write", "mla_decode")
def test_latents_beyond_2_gib(op: str, name: str, device: torch.device) -> None:
    skip_without_memory(device)
    near = latent(op, name, device, 8, [1, 3], [20, 35])
    block_size = near.cache.block_size
    blocks = 2 * GIB // (2 * block_size * 576) + 9
    cache = LatentCacheTensor(pool(blocks, (576,), device, block_size))
    assert cache.latent.numel() * 2 > 2 * GIB
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 16, "num_heads": 8}
    more = {"block_size": block_size, "num_blocks": blocks}
    table = table_of(op, name, device)
    write, decode, _ = available(
        lambda: table.resolve_together(MLA_OPS, BF16, BF16, **sizes, **more)
    )
    far = in_far_blocks(near.metadata, blocks, block_size)
    rows = near.cache.latent.flatten(0, 1)[torch.cat(all_slots(near.metadata, block_size))]
    write(rows[:, :512], rows[:, 512:], cache, torch.cat(all_slots(far, block_size)))
    out = decode(near.q, cache, near.up_proj, unknown_lengths(far), 0.1)
    check(out, near.wanted, 2**-5)


# The largest number of 8 bits times the scale, times these.
BEYOND = (-torch.inf, -1e4, -1.04, -1.0, 1.0, 1.001, 1.04, 1e3, torch.inf)


@each("kv_cache_write", "mla_cache_write")
def test_what_8_bits_cannot_hold_saturates(op: str, name: str, device: torch.device) -> None:
    """Hardware converts it to NaN."""
    table = table_of(op, name, device)
    storage = table.platform.fp8_dtype
    limit, scale = torch.finfo(storage).max, torch.tensor([0.7], device=device)
    factors = torch.tensor(BEYOND, device=device)
    numbers = (factors * limit * scale).to(BF16)
    slots = torch.arange(len(BEYOND), device=device)
    pools = torch.zeros(2, 2, 16, 2 * 128, device=device).to(storage)
    if op == "kv_cache_write":
        sizes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "sliding_window": 0}
        sizes |= {"block_size": 16, "num_blocks": 2}
        write = available(lambda: table.resolve(op, BF16, storage, **sizes))
        cache = KVCacheTensor(*(p.view(2, 16, 2, 128) for p in pools), scale, scale)
        rows = numbers[:, None, None].repeat(1, 2, 128)
        write(rows, rows, cache, slots)
    else:
        sizes = {"kv_lora_rank": 192, "qk_rope_head_dim": 64, "v_head_dim": 16, "num_heads": 8}
        sizes = sizes | {"block_size": 16, "num_blocks": 2}
        write = available(lambda: table.resolve(op, BF16, storage, **sizes))
        rows = numbers[:, None].repeat(1, 256)
        write(rows[:, :192], rows[:, 192:], LatentCacheTensor(pools[0], scale), slots)
        pools = pools[:1]
    for written in pools.cpu().float():
        found = written.unique().tolist()
        assert found == [-limit, 0, limit], found
