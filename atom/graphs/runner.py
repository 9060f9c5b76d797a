"""The target's layers as CUDA graphs.

A graph reads and writes the same memory at every replay: inputs are written where it was captured,
padded to the bucket's size, and the results are cut to the step's rows. Padding rows repeat the
batch's last token, have slot -1 (no KV write) and read a short context in the first block of row
0's table, whichever sequence owns it; their results are dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from atom.graphs.capture import MOST_ROWS, Bucket, GraphPlan, copy_all
from atom.model_ops.attention.metadata import ModelInput, ModelOutput

logger = logging.getLogger(__name__)

# A forward pass of the target's layers.
ForwardOp = Callable[[ModelInput], ModelOutput]
# The input of a bucket's graph with a number of queries per sequence: a function that reads it from
# where replays find it, as part of the captured work, with metadata of its own in every call.
GraphInputs = Callable[[Bucket, int], Callable[[], ModelInput]]


@dataclass(frozen=True)
class GraphKey:
    """One graph: its bucket and the number of queries per sequence."""

    bucket: Bucket
    query_len: int

    @property
    def batch_size(self) -> int:
        return self.bucket.batch_size

    @property
    def num_rows(self) -> int:
        return self.batch_size * self.query_len


# (number of sequences, tokens of the longest query, most tokens of a sequence before its query) ->
# the graph for such a batch; None to run it op by op. The graph's query may be longer: it is that
# of all sequences, with rows of padding behind their own.
FitOp = Callable[[int, int, int], GraphKey | None]


class GraphRunner:
    """Has a graph for every batch with queries no longer than the longest that is captured.

    Batches that fit no bucket run op by op: prefill, too many sequences, too long a context. Before
    `capture` all do.

    Attributes:
        forward: the target's layers.
        plan: what to capture.
        query_lens: the query lengths that are captured, ascending.
        graph_aux_hidden: aux hidden states that the graphs write, by (batch size, query length):
            one [batch size * query length, hidden] per requested layer.

    Args:
        query_lens: ascending.
    """

    def __init__(self, forward: ForwardOp, plan: GraphPlan, query_lens: tuple[int, ...]) -> None:
        self.forward = forward
        self.plan = plan
        self.query_lens = query_lens
        self._hidden: dict[tuple[int, int], torch.Tensor] = {}
        self.graph_aux_hidden: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        self._replays: dict[GraphKey, Callable[[], None]] = {}

    def fit(self, num_sequences: int, query_len: int, num_cached: int) -> GraphKey | None:
        """As `FitOp`."""
        padded = next((n for n in self.query_lens if n >= query_len), None)
        if padded is None:
            return None
        bucket = self.plan.fit(num_sequences, num_cached + padded)
        key = None if bucket is None else GraphKey(bucket, padded)
        return key if key in self._replays else None

    def replay(self, graph: GraphKey, num_rows: int) -> ModelOutput:
        """Hidden states of the first rows, valid until the next replay."""
        self._replays[graph]()
        whole = self.output(graph)
        aux = tuple(states[:num_rows] for states in whole.aux_hidden_states)
        return ModelOutput(whole.hidden_states[:num_rows], aux)

    def output(self, graph: GraphKey) -> ModelOutput:
        """What a graph writes, padding included; once outputs are allocated."""
        key = graph.batch_size, graph.query_len
        return ModelOutput(self._hidden[key], self.graph_aux_hidden[key])

    @property
    def num_graphs(self) -> int:
        return len(self.keys)

    @property
    def keys(self) -> list[GraphKey]:
        """What is captured, the largest first: all query lengths of every bucket, but for several
        queries of too many sequences.
        """
        lens = sorted(self.query_lens, reverse=True)
        keys = [GraphKey(bucket, length) for bucket in self.plan.buckets() for length in lens]
        return [key for key in keys if key.query_len == 1 or key.num_rows <= MOST_ROWS]

    @property
    def largest(self) -> GraphKey:
        """The graph with the most rows."""
        return max(self.keys, key=lambda key: (key.num_rows, key.bucket.max_context_len))

    @torch.inference_mode()
    def rehearse(self, inputs: GraphInputs) -> ModelOutput:
        """Run the largest graph's work once without capturing, and allocate what graphs write."""
        largest = self.largest
        output = self.forward(inputs(largest.bucket, largest.query_len)())
        self._allocate_outputs(output)
        return output

    @torch.inference_mode()
    def capture(self, inputs: GraphInputs) -> None:
        """Capture all graphs. The KV cache must be bound and must not move afterwards."""
        started = time.perf_counter()
        self.rehearse(inputs)
        keys = self.keys
        for key in tqdm(keys, desc="Capturing graphs", unit="graph", disable=None):
            work = partial(self._compute, key, inputs(key.bucket, key.query_len))
            self._replays[key] = self.plan.backend.capture(work)
        logger.info("captured %d graphs in %.1f s", len(keys), time.perf_counter() - started)

    def release(self) -> None:
        """Drop all graphs; every step runs eagerly then."""
        self._replays.clear()

    def _allocate_outputs(self, largest: ModelOutput) -> None:
        """Allocate outputs for the largest graph; smaller ones use their first rows."""
        hidden = torch.empty_like(largest.hidden_states)
        aux = tuple(torch.empty_like(states) for states in largest.aux_hidden_states)
        for graph in self.keys:
            key, rows = (graph.batch_size, graph.query_len), graph.num_rows
            self._hidden[key] = hidden[:rows]
            self.graph_aux_hidden[key] = tuple(states[:rows] for states in aux)

    def _compute(self, graph: GraphKey, read: Callable[[], ModelInput]) -> None:
        """The captured work of one graph."""
        key = (graph.batch_size, graph.query_len)
        output = self.forward(read())
        copy_all(
            [self._hidden[key], *self.graph_aux_hidden[key]],
            [output.hidden_states, *output.aux_hidden_states],
        )
