"""How work is captured once and replayed: backends, and the sizes it is captured for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from atom.platform import Platform

# Work that runs before a capture, so that libraries have made their handles and choices.
_WARMUP_RUNS = 2

# An op that cannot see lengths does the work of the longest context that its graph serves, so
# short contexts have graphs of their own. Longer ones run eagerly: there a step's kernels take
# longer than their launches anyway.
_CONTEXT_BOUNDS = (512, 2048, 8192)


class CaptureBackend(Protocol):
    """Turns work over persistent tensors into something that can be repeated."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What repeats `work` on whatever its tensors hold by then.

        `work` reads and writes tensors that outlive it, in an order that depends on nothing but
        their shapes. It runs during the capture, on what the tensors hold now.
        """
        ...


class CudaGraphBackend:
    """CUDA graphs, HIP graphs in a ROCm build. All captures share one pool of memory.

    Sharing is safe in any order of replays because no result stays in the pool: the work copies
    its results to tensors that were allocated before.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARMUP_RUNS):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        replay: Callable[[], None] = graph.replay
        return replay


class ReexecuteBackend:
    """Runs the work again: the bookkeeping around graphs, on a machine that has none."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


def capture_backend(platform: Platform) -> CaptureBackend | None:
    """What captures on `platform`; None where every step runs eagerly."""
    return CudaGraphBackend() if platform.is_gpu else None


@dataclass(frozen=True)
class Bucket:
    """Attributes:
    batch_size: sequences that the graph computes; fewer are padded.
    max_context_len: longest context that it serves.
    """

    batch_size: int
    max_context_len: int


@dataclass(frozen=True)
class GraphPlan:
    """What to capture, and with what.

    Attributes:
        batch_sizes, context_bounds: ascending; every pair is a bucket.
    """

    backend: CaptureBackend
    batch_sizes: tuple[int, ...]
    context_bounds: tuple[int, ...]
    block_size: int
    device: torch.device

    @property
    def largest(self) -> Bucket:
        return Bucket(self.batch_sizes[-1], self.context_bounds[-1])

    @property
    def table_width(self) -> int:
        """Blocks of a sequence with the longest context."""
        return -(-self.context_bounds[-1] // self.block_size)

    @property
    def num_buckets(self) -> int:
        return len(self.batch_sizes) * len(self.context_bounds)

    def buckets(self) -> Iterator[Bucket]:
        """Largest first: what it takes from the shared pool serves all that follow."""
        for batch_size in reversed(self.batch_sizes):
            for bound in reversed(self.context_bounds):
                yield Bucket(batch_size, bound)

    def fit(self, num_sequences: int, max_context_len: int) -> Bucket | None:
        """The smallest bucket that holds a batch; None when none does."""
        sizes = (size for size in self.batch_sizes if size >= num_sequences)
        bounds = (bound for bound in self.context_bounds if bound >= max_context_len)
        size, bound = next(sizes, None), next(bounds, None)
        return None if size is None or bound is None else Bucket(size, bound)


def default_batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... and `max_num_seqs` itself."""
    powers = (2**i for i in range(max_num_seqs.bit_length()))
    return tuple(sorted({*powers, max_num_seqs}))


def default_context_bounds(max_model_len: int) -> tuple[int, ...]:
    """Up to `max_model_len` or the longest context that graphs serve."""
    longest = min(max_model_len, _CONTEXT_BOUNDS[-1])
    return (*(bound for bound in _CONTEXT_BOUNDS if bound < longest), longest)


def fill_rows(buffer: torch.Tensor, rows: torch.Tensor, end: int, padding: int) -> None:
    """`rows` [n, ...], then padding up to `end`. A buffer wider than the rows keeps its rest."""
    count = rows.shape[0]
    if rows.dim() > 1:
        width = min(buffer.shape[1], rows.shape[1])
        buffer[:count, :width].copy_(rows[:, :width])
    else:
        buffer[:count].copy_(rows)
    if count < end:
        buffer[count:end].fill_(padding)
