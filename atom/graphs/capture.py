"""Graph capture: backends, and the buckets to capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from atom.model_ops.kernels.native.program import Arena, record
from atom.platform import Platform

# Runs before the capture, so that libraries are initialised and autotuned.
_WARMUP_RUNS = 2

# An op without host-side lengths works for the longest context of its graph, so short contexts have
# graphs of their own. Beyond the last bound steps run eagerly: there kernels take longer than their
# launches.
_CONTEXT_BOUNDS = (512, 2048, 8192)


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

    Graphs may be replayed in any order, since `work` copies its results out of the pool.
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


class NativeBackend:
    """Programs of C++ kernels on a CPU. All captures share one arena.

    Raises:
        NotRecordableError: when `work` calls an op that is no native kernel.
    """

    def __init__(self) -> None:
        self._arena = Arena()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        _, program = record(work, lambda _: (), self._arena)
        return program.replay


class ReexecuteBackend:
    """Runs the work again: tests the bookkeeping of graphs on a CPU."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


def capture_backend(platform: Platform) -> CaptureBackend | None:
    """The backend for a platform; None where every step runs eagerly."""
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
    """What to capture, with which backend.

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
        """Blocks of the longest context."""
        return -(-self.context_bounds[-1] // self.block_size)

    @property
    def num_buckets(self) -> int:
        return len(self.batch_sizes) * len(self.context_bounds)

    def buckets(self) -> Iterator[Bucket]:
        """All buckets, the largest first, so that the memory pool needs to grow only once."""
        for batch_size in reversed(self.batch_sizes):
            for bound in reversed(self.context_bounds):
                yield Bucket(batch_size, bound)

    def fit(self, num_sequences: int, max_context_len: int) -> Bucket | None:
        """The smallest bucket that fits a batch; None if none does."""
        sizes = (size for size in self.batch_sizes if size >= num_sequences)
        bounds = (bound for bound in self.context_bounds if bound >= max_context_len)
        size, bound = next(sizes, None), next(bounds, None)
        return None if size is None or bound is None else Bucket(size, bound)


def default_batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... and `max_num_seqs`."""
    powers = (2**i for i in range(max_num_seqs.bit_length()))
    return tuple(sorted({*powers, max_num_seqs}))


def default_context_bounds(max_model_len: int) -> tuple[int, ...]:
    """Context bounds up to `max_model_len`, or up to the longest context of any graph."""
    longest = min(max_model_len, _CONTEXT_BOUNDS[-1])
    return (*(bound for bound in _CONTEXT_BOUNDS if bound < longest), longest)


def fill_rows(buffer: torch.Tensor, rows: torch.Tensor, end: int, padding: int) -> None:
    """Copy `rows` [n, ...] into `buffer` and pad up to row `end`.

    Columns of `buffer` beyond the width of `rows` keep their values.
    """
    count = rows.shape[0]
    if rows.dim() > 1:
        width = min(buffer.shape[1], rows.shape[1])
        buffer[:count, :width].copy_(rows[:, :width])
    else:
        buffer[:count].copy_(rows)
    if count < end:
        buffer[count:end].fill_(padding)
