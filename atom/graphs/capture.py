"""Graph capture: backends, captured work, and what is captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal, Protocol

import torch

from atom.platform import Platform

# An op without host-side lengths is launched for the longest context of its graph, so short
# contexts have graphs of their own. One more bound is the longest context of all.
_CONTEXT_BOUNDS = (512, 2048, 8192, 32768, 131072)
# From so many sequences on, batch sizes have two steps to each power of two, then four.
_TWO_STEPS, _FOUR_STEPS = 16, 128
# Up to so many queries per sequence, each number may have graphs.
_ALL_LENGTHS = 5
# Rows of the largest graph with several queries per sequence, and of the largest choice of tokens:
# more take longer than their launches, and lots of memory.
MOST_ROWS = 1024


class CaptureBackend(Protocol):
    """Captures work on persistent tensors for replay."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work`; returns a function that repeats it on its tensors' current contents.

        `work` reads and writes tensors that outlive it; its operations may depend only on their
        shapes. It also runs during the capture.
        """
        ...


class CudaGraphBackend:
    """CUDA graphs (HIP graphs on ROCm). All captures share one memory pool.

    Graphs may be replayed in any order, since `work` copies its results out of the pool. A graph
    keeps its `work`, and so all tensors that only this refers to: it reads them at their addresses.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Libraries are initialised and kernels compiled, which a capture cannot do.
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return partial(_replay, graph, work)


def _replay(graph: torch.cuda.CUDAGraph, _: Callable[[], None]) -> None:
    graph.replay()


def copy_all(places: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Copy each result to its place: on a GPU one launch, if all have one type."""
    torch._foreach_copy_(list(places), list(results))


class ReexecuteBackend:
    """Runs the work again: tests the bookkeeping of graphs on a CPU."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


# Returns its results.
Work = Callable[[], Sequence[torch.Tensor]]


class CapturedWork:
    """Replays work that was captured; its results are kept where no other work writes."""

    def __init__(self, backend: CaptureBackend) -> None:
        self._backend = backend
        self._kept: dict[GraphKey, Sequence[torch.Tensor]] = {}
        self._replays: dict[GraphKey, Callable[[], None]] = {}

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._replays

    @torch.inference_mode()
    def capture(self, key: GraphKey, work: Work, places: Sequence[torch.Tensor]) -> None:
        """Capture `work`, as `CaptureBackend.capture` wants it.

        Args:
            places: where the results are kept.
        """
        self._kept[key] = places
        self._replays[key] = self._backend.capture(partial(self._compute, key, work))

    def replay(self, key: GraphKey) -> Sequence[torch.Tensor]:
        """The results, valid until the next replay that keeps its own there."""
        self._replays[key]()
        return self._kept[key]

    def release(self) -> None:
        """Drop everything."""
        self._replays.clear()

    def _compute(self, key: GraphKey, work: Work) -> None:
        """What is captured."""
        copy_all(self._kept[key], work())


def capture_backend(platform: Platform) -> CaptureBackend | None:
    """The backend for a platform; None where every step runs eagerly."""
    return CudaGraphBackend() if platform.is_gpu else None


# The target's layers, the choice of tokens with verification, and the drafts.
Stage = Literal["target", "choose", "draft"]


@dataclass(frozen=True)
class GraphKey:
    """One graph: a stage of a step, for so many sequences with as many queries each.

    Attributes:
        batch_size, query_len: sequences, of which fewer are padded, and the queries of each.
        max_context_len: longest context that it serves; all, if it reads none.
        variant: in which way, where a stage has several.
    """

    batch_size: int
    query_len: int
    max_context_len: int
    stage: Stage = "target"
    variant: Hashable = None

    @property
    def num_rows(self) -> int:
        return self.batch_size * self.query_len

    def behind(self, stage: Stage, variant: Hashable) -> GraphKey:
        """A later stage of the same step."""
        return GraphKey(self.batch_size, self.query_len, self.max_context_len, stage, variant)


@dataclass(frozen=True)
class GraphPlan:
    """Which graphs of the target to capture, with which backend.

    Attributes:
        batch_sizes, context_bounds, query_lens: ascending; all combinations are captured, but for
            several queries of too many sequences.
    """

    backend: CaptureBackend
    batch_sizes: tuple[int, ...]
    context_bounds: tuple[int, ...]
    query_lens: tuple[int, ...]
    block_size: int
    device: torch.device

    @property
    def table_width(self) -> int:
        """Blocks of the longest context."""
        return -(-self.context_bounds[-1] // self.block_size)

    @property
    def keys(self) -> list[GraphKey]:
        """The largest first, so that the memory pool needs to grow only once."""
        sizes = reversed(self.batch_sizes), reversed(self.context_bounds), reversed(self.query_lens)
        keys = [GraphKey(size, length, bound) for size, bound, length in product(*sizes)]
        return [key for key in keys if key.query_len == 1 or key.num_rows <= MOST_ROWS]

    @property
    def largest(self) -> GraphKey:
        """The graph with the most rows."""
        return max(self.keys, key=lambda key: (key.num_rows, key.max_context_len))

    def fit(self, num_sequences: int, query_len: int, num_cached: int) -> GraphKey | None:
        """The smallest graph that fits a batch, as `GraphRunner.fit`; None if none does."""
        length = next((n for n in self.query_lens if n >= query_len), None)
        size = next((n for n in self.batch_sizes if n >= num_sequences), None)
        if length is None or size is None:
            return None
        bound = next((n for n in self.context_bounds if n >= num_cached + length), None)
        return None if bound is None else GraphKey(size, length, bound)


def default_batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, ... and `max_num_seqs`.

    From 16 on at most a third of a graph's rows are padding, from 128 on at most a fifth.
    """
    sizes = {max_num_seqs}
    for power in (2**i for i in range(max_num_seqs.bit_length())):
        steps = 1 if power < _TWO_STEPS else 2 if power < _FOUR_STEPS else 4
        sizes |= {power + power * i // steps for i in range(steps)}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def query_lengths(num_drafts: int, *, varying: bool) -> tuple[int, ...]:
    """The numbers of queries per sequence to capture: one, and with all drafts.

    Args:
        varying: whether steps verify any number of drafts. Then there are all numbers in between,
            or half as many, a quarter, ... if they are many.
    """
    most = 1 + num_drafts
    if not varying:
        return tuple(sorted({1, most}))
    if most <= _ALL_LENGTHS:
        return tuple(range(1, most + 1))
    return tuple(sorted({-(-most // 2**i) for i in range(most.bit_length() + 1)}))


def default_context_bounds(max_model_len: int, num_drafts: int) -> tuple[int, ...]:
    """Context bounds. The last is that of every step: behind the longest context may be padding for
    `num_drafts` drafts that it has no room for.
    """
    shorter = (bound for bound in _CONTEXT_BOUNDS if bound < max_model_len)
    return (*shorter, max_model_len + num_drafts)
