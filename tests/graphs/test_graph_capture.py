"""What is captured: sizes, buckets, and the flags that choose them."""

from __future__ import annotations

import argparse
import itertools

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.config import ConfigError, EngineConfig, parse_sizes
from atom.graphs.capture import (
    GraphPlan,
    ReexecuteBackend,
    default_batch_sizes,
    default_context_bounds,
    query_lengths,
)
from atom.graphs.runner import GraphKey
from atom.model_engine.arg_utils import (
    add_engine_flags,
    engine_config,
    engine_options,
)


def plan(
    sizes: tuple[int, ...], bounds: tuple[int, ...], lens: tuple[int, ...] = (1,)
) -> GraphPlan:
    return GraphPlan(ReexecuteBackend(), sizes, bounds, lens, 16, torch.device("cpu"))


def parse(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return engine_config(**engine_options(parser.parse_args(flags)))


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (5, (1, 2, 4, 5)),
        (8, (1, 2, 4, 8)),
        (40, (1, 2, 4, 8, 16, 24, 32, 40)),
        (256, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)),
        (300, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 300)),
    ],
)
def test_default_sizes_reach_every_batch(most: int, sizes: tuple[int, ...]) -> None:
    assert default_batch_sizes(most) == sizes


def test_few_rows_of_a_large_graph_are_padding() -> None:
    """From the next smaller graph on, the least that a graph's own batches fill of it."""
    sizes = default_batch_sizes(1024)
    filled = {size: (before + 1) / size for before, size in itertools.pairwise(sizes)}
    assert all(share > 2 / 3 for size, share in filled.items() if size > 16)
    assert all(share > 4 / 5 for size, share in filled.items() if size > 128)
    assert len(sizes) == 23


@pytest.mark.parametrize(
    ("context", "bounds"),
    [
        (96, (96,)),
        (512, (512,)),
        (513, (512, 513)),
        (4096, (512, 2048, 4096)),
        (32768, (512, 2048, 8192, 32768)),
        (131072, (512, 2048, 8192, 32768, 131072)),
        (262144, (512, 2048, 8192, 32768, 131072, 262144)),
    ],
)
def test_default_contexts_reach_the_models(context: int, bounds: tuple[int, ...]) -> None:
    assert default_context_bounds(context, 0) == bounds
    assert plan((1, 4), bounds).fit(3, 1, context - 1) == GraphKey(4, 1, context)
    with_padding = default_context_bounds(context, 3)
    assert with_padding == (*bounds[:-1], context + 3)
    graphs = plan((1, 4), with_padding, (1, 4))
    assert graphs.fit(3, 2, context - 1) == GraphKey(4, 4, context + 3)


@pytest.mark.parametrize(("context", "layers"), [(8192, 90), (131072, 150), (262144, 180)])
def test_how_many_graphs_a_context_takes(context: int, layers: int) -> None:
    """With 256 sequences and 3 drafts; block tables are as wide as the last bound alone asks."""
    bounds = default_context_bounds(context, 3)
    graphs = plan(default_batch_sizes(256), bounds, query_lengths(3, varying=False))
    assert len(graphs.keys) == layers
    assert graphs.largest == GraphKey(256, 4, context + 3)
    assert graphs.table_width == plan((256,), bounds[-1:]).table_width == context // 16 + 1


@pytest.mark.parametrize(
    ("most", "lens"),
    [
        (0, (1,)),
        (1, (1, 2)),
        (3, (1, 2, 3, 4)),
        (4, (1, 2, 3, 4, 5)),
        (5, (1, 2, 3, 6)),
        (15, (1, 2, 4, 8, 16)),
    ],
)
def test_query_lengths_where_numbers_of_drafts_vary(most: int, lens: tuple[int, ...]) -> None:
    assert query_lengths(most, varying=True) == lens
    assert query_lengths(most, varying=False) == tuple(sorted({1, most + 1}))


@settings(max_examples=50)
@given(
    st.sets(st.integers(1, 20), min_size=1).map(lambda s: tuple(sorted(s))),
    st.sets(st.integers(1, 40), min_size=1).map(lambda s: tuple(sorted(s))),
    st.integers(1, 25),
    st.integers(1, 45),
)
def test_the_smallest_graph_that_fits(
    sizes: tuple[int, ...], bounds: tuple[int, ...], count: int, context: int
) -> None:
    every = [GraphKey(size, 1, bound) for size, bound in itertools.product(sizes, bounds)]
    fitting = [k for k in every if k.batch_size >= count and k.max_context_len >= context]
    smallest = min(fitting, key=lambda k: (k.batch_size, k.max_context_len), default=None)
    assert plan(sizes, bounds).fit(count, 1, context - 1) == smallest


def test_largest_graphs_come_first() -> None:
    keys = plan((1, 2, 6), (8, 40), (1, 3)).keys
    assert keys == [GraphKey(s, n, c) for s in (6, 2, 1) for c in (40, 8) for n in (3, 1)]
    assert plan((1,), (8, 40)).table_width == 3


@pytest.mark.parametrize("value", ["1,2,8", ["1,2", "8"], ["1", "2", "8"], [1, 2, 8], (1, 2, 8)])
def test_sizes_are_lists_of_integers(value: str | list[str | int]) -> None:
    assert parse_sizes(value) == (1, 2, 8)
    config = engine_config(cudagraph_capture_sizes=value)
    assert config.graphs.capture_sizes == (1, 2, 8)


@pytest.mark.parametrize(
    "flags",
    [
        ["--cudagraph-capture-sizes", "1,2,8"],
        ["--cudagraph_capture_sizes", "1", "2", "8"],
        ["--cudagraph-capture-sizes", "1", "--cudagraph-capture-sizes", "2,8"],
    ],
)
def test_flags_reach_the_configuration(flags: list[str]) -> None:
    assert parse(*flags).graphs.capture_sizes == (1, 2, 8)


def test_options_survive_the_way_to_the_engine_process() -> None:
    config = parse("--cudagraph-capture-sizes", "1", "2,8")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert engine_config().graphs.capture_sizes is None
    assert not engine_config().graphs.enforce_eager
    assert parse("--enforce-eager").graphs.enforce_eager


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cudagraph_capture_sizes": "1,two"}, "expected integers such as 1,2,4, got '1,two'"),
        ({"cudagraph_capture_sizes": ""}, "expected integers"),
        ({"cudagraph_capture_sizes": []}, "names no size"),
        ({"cudagraph_capture_sizes": "0,1"}, "at least 1, got 0"),
        ({"cudagraph_capture_sizes": "-1"}, "at least 1, got -1"),
        ({"cudagraph_capture_sizes": "2,1"}, "must ascend, got 2,1"),
        ({"cudagraph_capture_sizes": "2,2"}, "must ascend, got 2,2"),
        ({"cudagraph_capture_sizes": "1,65"}, "max_num_seqs=64"),
        ({"cudagraph_capture_sizes": "1", "enforce_eager": True}, "one or the other"),
    ],
)
def test_wrong_sizes_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config(**options)
