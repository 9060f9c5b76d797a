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
from functools import partial

import torch
from tqdm import tqdm

from atom.graphs.capture import CapturedWork, GraphKey, GraphPlan
from atom.model_ops.attention.metadata import ModelInput, ModelOutput

logger = logging.getLogger(__name__)

# A forward pass of the target's layers.
ForwardOp = Callable[[ModelInput], ModelOutput]
# The input of a graph: a function that reads it from where replays find it, as part of the captured
# work, with metadata of its own in every call.
GraphInputs = Callable[[GraphKey], Callable[[], ModelInput]]


class GraphRunner:
    """Has a graph for every batch with queries no longer than the longest that is captured.

    Batches that fit no graph run op by op: prefill, too many sequences, too long a context. Before
    `capture` all do.

    Attributes:
        forward: the target's layers.
        plan: what to capture.
        captured: all graphs of steps, also those that follow the layers.
        graph_aux_hidden: aux hidden states that the graphs write, by (batch size, query length):
            one [batch size * query length, hidden] per requested layer.
    """

    def __init__(self, forward: ForwardOp, plan: GraphPlan) -> None:
        self.forward = forward
        self.plan = plan
        self.captured = CapturedWork(plan.backend)
        self._hidden: dict[tuple[int, int], torch.Tensor] = {}
        self.graph_aux_hidden: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def fit(self, num_sequences: int, query_len: int, num_cached: int) -> GraphKey | None:
        """The graph for a batch; None to run it op by op.

        Its query may be longer: it is that of all sequences, with rows of padding behind their own.

        Args:
            query_len: tokens of the longest query.
            num_cached: most tokens of a sequence before its query.
        """
        key = self.plan.fit(num_sequences, query_len, num_cached)
        return key if key is not None and key in self.captured else None

    def replay(self, key: GraphKey, num_rows: int) -> ModelOutput:
        """Hidden states of the first rows, valid until the next replay."""
        hidden, *aux = self.captured.replay(key)
        return ModelOutput(hidden[:num_rows], tuple(states[:num_rows] for states in aux))

    def output(self, key: GraphKey) -> ModelOutput:
        """What a graph writes, padding included; once outputs are allocated."""
        rows = key.batch_size, key.query_len
        return ModelOutput(self._hidden[rows], self.graph_aux_hidden[rows])

    @torch.inference_mode()
    def rehearse(self, inputs: GraphInputs) -> ModelOutput:
        """Run the largest graph's work once without capturing, and allocate what graphs write."""
        output = self.forward(inputs(self.plan.largest)())
        self._allocate_outputs(output)
        return output

    @torch.inference_mode()
    def capture(self, inputs: GraphInputs) -> None:
        """Capture all graphs. The KV cache must be bound and must not move afterwards."""
        started = time.perf_counter()
        self.rehearse(inputs)
        keys = self.plan.keys
        for key in tqdm(keys, desc="Capturing graphs", unit="graph", disable=None):
            work = partial(self._compute, inputs(key))
            self.captured.capture(key, work, _tensors(self.output(key)))
        logger.info("captured %d graphs in %.1f s", len(keys), time.perf_counter() - started)

    def _allocate_outputs(self, largest: ModelOutput) -> None:
        """Allocate outputs for the largest graph; smaller ones use their first rows."""
        hidden, *aux = (torch.empty_like(states) for states in _tensors(largest))
        for key in self.plan.keys:
            rows = key.batch_size, key.query_len
            self._hidden[rows] = hidden[: key.num_rows]
            self.graph_aux_hidden[rows] = tuple(states[: key.num_rows] for states in aux)

    def _compute(self, read: Callable[[], ModelInput]) -> list[torch.Tensor]:
        return _tensors(self.forward(read()))


def _tensors(output: ModelOutput) -> list[torch.Tensor]:
    return [output.hidden_states, *output.aux_hidden_states]
