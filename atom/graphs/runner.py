"""Who runs the target's layers: eagerly, or by replaying graphs.

A graph reads and writes the same memory at every replay, so a batch is copied to persistent
buffers, padded to a bucket's size, and the results are cut to the batch's own rows. Padding rows
have slot -1, which writes nothing, and a short context in block 0, which is finite whoever owns
it; what they compute is thrown away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from tqdm import tqdm

from atom.graphs.capture import Bucket, GraphPlan, fill_rows
from atom.model_ops.metadata import AttentionMetadata, ModelInput, ModelOutput

logger = logging.getLogger(__name__)

# One pass over the target's layers.
ForwardOp = Callable[[ModelInput], ModelOutput]


class ForwardRunner(Protocol):
    """Runs the layers of the target over one batch."""

    def run(self, model_input: ModelInput) -> ModelOutput:
        """The hidden states of the batch's T rows; they are valid until the next run."""
        ...


class EagerRunner:
    """Calls the model's layers."""

    def __init__(self, forward: ForwardOp) -> None:
        self._forward = forward

    def run(self, model_input: ModelInput) -> ModelOutput:
        return self._forward(model_input)


class GraphRunner:
    """Replays a graph for every batch in which all sequences have equally many queries.

    A batch that fits no bucket runs eagerly: prefill, sequences with different numbers of
    drafts, more sequences or a longer context than any graph serves. So does everything before
    `capture`.

    Attributes:
        plan: what is captured.
        graph_aux_hidden: for each (batch size, queries per sequence) the aux hidden states that
            its graphs write, one [batch size * queries, hidden] per requested layer.

    Args:
        query_lens: queries per sequence that are captured.
    """

    def __init__(self, forward: ForwardOp, plan: GraphPlan, query_lens: tuple[int, ...]) -> None:
        self._forward = forward
        self.plan = plan
        self._query_lens = query_lens
        self._inputs = _InputBuffers(plan, query_lens)
        self._hidden: dict[tuple[int, int], torch.Tensor] = {}
        self.graph_aux_hidden: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        self._replays: dict[tuple[Bucket, int], Callable[[], None]] = {}

    def run(self, model_input: ModelInput) -> ModelOutput:
        metadata = model_input.attention
        bucket = self.plan.fit(len(metadata.query_lens_cpu), metadata.max_context_len)
        query_len = metadata.max_seqlen_q
        ragged = any(length != query_len for length in metadata.query_lens_cpu)
        if bucket is None or ragged or (bucket, query_len) not in self._replays:
            return self._forward(model_input)
        self._inputs.load(model_input, bucket)
        self._replays[bucket, query_len]()
        key, rows = (bucket.batch_size, query_len), model_input.input_ids.shape[0]
        aux = tuple(states[:rows] for states in self.graph_aux_hidden[key])
        return ModelOutput(self._hidden[key][:rows], aux)

    @property
    def num_graphs(self) -> int:
        """Graphs of the target, and as many of a proposer as for one query length."""
        buckets = len(self.plan.batch_sizes) * len(self.plan.context_bounds)
        return buckets * (len(self._query_lens) + 1)

    @torch.inference_mode()
    def rehearse(self) -> ModelOutput:
        """Run the largest bucket's work, all padding, without capturing it."""
        largest = self._inputs.view(self.plan.largest, max(self._query_lens))
        return self._forward(largest)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every bucket; the KV cache is bound by now and stays where it is."""
        started = time.perf_counter()
        self._allocate_outputs(self.rehearse())
        lens = sorted(self._query_lens, reverse=True)
        keys = [(bucket, query_len) for bucket in self.plan.buckets() for query_len in lens]
        for key in tqdm(keys, desc="Capturing graphs", unit="graph", disable=None):
            self._replays[key] = self.plan.backend.capture(partial(self._compute, *key))
        logger.info("captured %d graphs in %.1f s", len(keys), time.perf_counter() - started)

    def _allocate_outputs(self, largest: ModelOutput) -> None:
        """Results have room for the largest bucket; smaller ones use the first rows."""
        hidden = torch.empty_like(largest.hidden_states)
        aux = tuple(torch.empty_like(states) for states in largest.aux_hidden_states)
        for batch_size in self.plan.batch_sizes:
            for query_len in self._query_lens:
                key, rows = (batch_size, query_len), batch_size * query_len
                self._hidden[key] = hidden[:rows]
                self.graph_aux_hidden[key] = tuple(states[:rows] for states in aux)

    def _compute(self, bucket: Bucket, query_len: int) -> None:
        """What a graph holds."""
        key = (bucket.batch_size, query_len)
        output = self._forward(self._inputs.view(bucket, query_len))
        self._hidden[key].copy_(output.hidden_states)
        kept = self.graph_aux_hidden[key]
        for states, result in zip(kept, output.aux_hidden_states, strict=True):
            states.copy_(result)


class _InputBuffers:
    """What every graph reads; each bucket the first rows of it. All padding at first."""

    def __init__(self, plan: GraphPlan, query_lens: tuple[int, ...]) -> None:
        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=plan.device)

        size, longest = plan.batch_sizes[-1], max(query_lens)
        self._input_ids = integers(size * longest)
        self._positions = integers(size * longest)
        self._slot_mapping = integers(size * longest).fill_(-1)
        self._block_tables = integers(size, plan.table_width, dtype=torch.int32)
        self._block_counts = integers(size, dtype=torch.int32)
        # A sequence's last query sits at the end of its context, so none is shorter than that.
        self._context_lens = integers(size, dtype=torch.int32).fill_(longest)
        starts = torch.arange(size + 1, dtype=torch.int32, device=plan.device)
        self._cu_seqlens = {query_len: starts * query_len for query_len in query_lens}
        self._no_logits = integers(0)

    def load(self, model_input: ModelInput, bucket: Bucket) -> None:
        """Copy a batch, and pad it to the bucket's size."""
        metadata = model_input.attention
        size, query_len = bucket.batch_size, metadata.max_seqlen_q
        fill_rows(self._input_ids, model_input.input_ids, size * query_len, 0)
        fill_rows(self._positions, model_input.positions, size * query_len, 0)
        fill_rows(self._slot_mapping, metadata.slot_mapping, size * query_len, -1)
        fill_rows(self._block_tables, metadata.block_tables, size, 0)
        fill_rows(self._block_counts, metadata.block_counts, size, 0)
        fill_rows(self._context_lens, metadata.context_lens, size, query_len)

    def view(self, bucket: Bucket, query_len: int) -> ModelInput:
        """The bucket's rows; the same memory at every call."""
        size, rows = bucket.batch_size, bucket.batch_size * query_len
        attention = AttentionMetadata(
            slot_mapping=self._slot_mapping[:rows],
            block_tables=self._block_tables[:size],
            block_counts=self._block_counts[:size],
            context_lens=self._context_lens[:size],
            cu_seqlens_q=self._cu_seqlens[query_len][: size + 1],
            max_seqlen_q=query_len,
            max_context_len=bucket.max_context_len,
            query_lens_cpu=(query_len,) * size,
            context_lens_cpu=None,
        )
        return ModelInput(
            self._input_ids[:rows], self._positions[:rows], attention, self._no_logits
        )
