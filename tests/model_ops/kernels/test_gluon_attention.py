"""Gluon paged attention against float64 attention over the same cache.

Without a GPU the arithmetic of the kernel's body runs interpreted, for both generations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from gluon_interpreter import interpreted
from hypothesis import given, settings
from hypothesis import strategies as st
from test_triton_attention import metadata_of, random_cache, reference

from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.kernels.gluon import paged_attention as gluon
from atom.model_ops.kernels.triton.attention.paged_attention import num_splits
from atom.platform import current_platform

TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
Run = Callable[..., torch.Tensor]
ONE_UNIT, MANY_UNITS = 1, 64


@pytest.fixture
def run(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Run:
    return run_of(device, monkeypatch)


def run_of(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The op; it takes first the compute units, which decide into how many parts it splits."""
    if device.type == "cpu":
        monkeypatch.setattr(gluon, "_attend", interpreted(gluon._attend))
        return partial(gluon.attend, 3)
    if current_platform().arch not in gluon._GENERATION:
        pytest.skip("for gfx942 and gfx950; where there is no GPU its arithmetic is tested")
    return partial(gluon.attend, gluon._GENERATION[current_platform().arch])


def check(
    run: Run,
    device: torch.device,
    sequences: list[tuple[int, int]],
    *,
    units: int = ONE_UNIT,
    heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    storage: torch.dtype | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Run over a random cache, compare with the reference, and return the result."""
    num_blocks = sum(-(-context // block_size) for context, _ in sequences) + 1
    cache = random_cache((num_blocks, block_size, heads, head_dim), storage or dtype, device)
    metadata = metadata_of(sequences, block_size, num_blocks, device)
    num_tokens = sum(queries for _, queries in sequences)
    # Queries as a slice of a wider projection.
    q = torch.randn(num_tokens, heads + 1, head_dim, generator=torch.Generator().manual_seed(2))
    q = q.to(dtype).to(device)[:, :heads]
    out = run(units, q, cache, metadata, head_dim**-0.5, window)
    expected = reference(q, cache, metadata, head_dim**-0.5, window)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    return out


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_and_head_sizes(
    run: Run, device: torch.device, head_dim: int, block_size: int
) -> None:
    sequences = [(1, 1), (block_size, 3), (block_size + 5, 16), (3 * block_size - 1, 2)]
    check(run, device, sequences, head_dim=head_dim, block_size=block_size)


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float16])
def test_storages(run: Run, device: torch.device, storage: torch.dtype) -> None:
    if device.type != "cpu" and storage not in (torch.float16, current_platform().fp8_dtype):
        pytest.skip(f"{current_platform().arch} has another 8 bit float")
    dtype = torch.float16 if storage == torch.float16 else torch.bfloat16
    check(run, device, [(37, 4), (9, 1)], dtype=dtype, storage=storage, head_dim=128)


@pytest.mark.parametrize("window", [1, 7, 16, 40, 500])
def test_windows(run: Run, device: torch.device, window: int) -> None:
    check(run, device, [(90, 5), (39, 16)], window=window, block_size=32, heads=1)


def test_a_window_is_split(run: Run, device: torch.device) -> None:
    check(run, device, [(700, 5), (39, 16)], units=MANY_UNITS, window=520, block_size=64, heads=1)


@pytest.mark.parametrize("sequences", [[(1030, 1)], [(530, 4), (3, 1), (0, 0), (512, 1)]])
def test_split_contexts(run: Run, device: torch.device, sequences: list[tuple[int, int]]) -> None:
    assert num_splits(len(sequences), max(sequences)[0], MANY_UNITS) > 1
    check(run, device, sequences, units=MANY_UNITS, block_size=64, heads=1)


@settings(max_examples=8)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 16)), min_size=1, max_size=3),
    block_size=st.sampled_from([16, 32, 64]),
    window=st.none() | st.integers(1, 90),
)
def test_any_lengths(
    device: torch.device, lengths: list[tuple[int, int]], block_size: int, window: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run = run_of(device, patch)
        sequences = [(context, min(queries, context)) for context, queries in lengths]
        check(run, device, sequences, block_size=block_size, window=window)


def test_a_pool_beyond_31_bits(run: Run, device: torch.device) -> None:
    heads, head_dim, block_size = 8, 128, 16
    per_block = heads * head_dim * block_size
    num_blocks = 2**31 // per_block + 2
    pool = torch.empty(num_blocks, block_size, heads, head_dim, dtype=torch.bfloat16, device=device)
    context = 2 * block_size - 3
    metadata = metadata_of([(context, 1)], block_size, 4, device)
    metadata.block_tables[0, 0] = num_blocks - 1
    metadata.block_tables[0, 1] = 70_000  # beyond 16 bits
    table = metadata.block_tables[0].tolist()
    for block in table:
        pool[block] = torch.randn(block_size, heads, head_dim)
    q = torch.randn(1, heads, head_dim, device=device).bfloat16()
    out = run(ONE_UNIT, q, KVCacheTensor(pool, pool), metadata, head_dim**-0.5, None)
    small = pool[table].contiguous()
    metadata.block_tables.copy_(torch.tensor([[0, 1]]))
    expected = reference(q, KVCacheTensor(small, small), metadata, head_dim**-0.5, None)
    torch.testing.assert_close(out.cpu().double(), expected, atol=1.5e-2, rtol=1.5e-2)


def test_what_lies_behind_the_context_does_not_matter(run: Run, device: torch.device) -> None:
    cache = random_cache((2, 16, 2, 64), torch.bfloat16, device)
    metadata = metadata_of([(11, 2)], 16, 1, device)
    q = torch.randn(2, 2, 64, device=device).bfloat16()
    before = run(ONE_UNIT, q, cache, metadata, 0.125, None)
    cache.key[0, 11:] = float("nan")
    cache.value[0, 11:] = float("inf")
    assert torch.equal(run(ONE_UNIT, q, cache, metadata, 0.125, None), before)


def test_too_many_queries_are_refused(run: Run, device: torch.device) -> None:
    cache = random_cache((3, 16, 2, 64), torch.bfloat16, device)
    q = torch.zeros(17, 2, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="17 queries of a sequence; at most 16"):
        run(ONE_UNIT, q, cache, metadata_of([(20, 17)], 16, 3, device), 0.125, None)


def test_grouped_queries_are_refused(run: Run, device: torch.device) -> None:
    cache = random_cache((3, 16, 2, 64), torch.bfloat16, device)
    q = torch.zeros(1, 4, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="without grouped queries"):
        run(ONE_UNIT, q, cache, metadata_of([(20, 1)], 16, 3, device), 0.125, None)
