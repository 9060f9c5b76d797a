"""The graphs of a step that decodes: the target's layers, and what follows them as two more.

The choice of tokens with their verification, and the drafts. The first depends on no context, so
it is captured for each number of sequences and queries only, and the layers, which take longest
to capture, need not be captured for each kind of choice. All inputs are where the graph of the
layers finds its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from tqdm import tqdm

from atom.graphs.capture import MOST_ROWS, Bucket
from atom.graphs.captured import CapturedWork
from atom.graphs.runner import GraphKey, GraphRunner
from atom.kv_cache.memory import PeakOf, estimate_graph_bytes, peak_bytes
from atom.model_engine.input_builder import InputBuilder, StepInput
from atom.model_engine.step_places import GraphInput
from atom.model_ops.metadata import ModelInput, ModelOutput
from atom.sampling.decode_rows import KINDS, DecodeRows, DecodeSampler
from atom.sampling.rows import Needs
from atom.sampling.sampler import Verified
from atom.spec_decode.base import DraftKey, Proposal, Proposer, VerifiedStep
from atom.spec_decode.draft_graphs import DraftGraphs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChoiceKey:
    """One graph: sequences, queries of each, and how their tokens are chosen."""

    batch_size: int
    query_len: int
    kind: Needs


@dataclass(frozen=True)
class _Kept:
    """What graphs of B sequences with as many queries pass on.

    Attributes:
        last_rows: [B] int64, as in `VerifiedStep`.
        accepted: [B] int64, how many drafts count as accepted if that is synthetic.
    """

    last_rows: torch.Tensor
    accepted: torch.Tensor


class StepGraphs:
    """Captures all graphs of steps, and replays those of the choice of tokens.

    Args:
        target: the layers' graphs.
        drafts: where the proposer's graphs are kept; None if it has none.
        synthetic: whether acceptance is.
    """

    def __init__(
        self,
        target: GraphRunner,
        inputs: InputBuilder,
        sampler: DecodeSampler,
        proposer: Proposer,
        drafts: DraftGraphs | None,
        *,
        synthetic: bool,
    ) -> None:
        self._target = target
        self._inputs = inputs
        self._sampler = sampler
        self._proposer = proposer
        self._drafts = drafts
        self._synthetic = synthetic
        self._choices = CapturedWork(target.plan.backend)
        self._kept: dict[tuple[int, int], _Kept] = {}

    @property
    def num_graphs(self) -> tuple[int, int, int]:
        """Of the target's layers, of choices of tokens, and of drafts."""
        choices, drafts = self._choice_keys(), self._draft_keys()
        return self._target.num_graphs, sum(1 for _ in choices), sum(1 for _ in drafts)

    def estimate_bytes(self, peak_of: PeakOf = peak_bytes) -> int:
        """Memory that `capture` will need.

        Args:
            peak_of: as for `estimate_graph_bytes`.
        """
        of_layers, *of_others = self.num_graphs
        layers = partial(self._target.rehearse, self._read)
        return estimate_graph_bytes(layers, self._rehearse, of_layers, sum(of_others), peak_of)

    def _read(self, bucket: Bucket, query_len: int) -> Callable[[], ModelInput]:
        return self._inputs.graph_input(bucket, query_len).read

    def capture(self) -> None:
        """Capture all graphs, the layers' first. The KV cache must be bound and must not move."""
        self._target.capture(self._read)
        started = time.perf_counter()
        keys = [*self._choice_keys(), *self._draft_keys()]
        for key in tqdm(keys, desc="Capturing choices and drafts", unit="graph", disable=None):
            if self._drafts is not None and isinstance(key, DraftKey):
                self._drafts.capture(key, self._drafting(key))
            elif isinstance(key, ChoiceKey):
                last = [self._kept_of(key).last_rows]
                self._choices.capture(key, self._choosing(key), last)
        seconds = time.perf_counter() - started
        logger.info("captured %d graphs of choices and drafts in %.1f s", len(keys), seconds)

    def _rehearse(self) -> None:
        """After the layers, run once what needs the most memory, without capturing it."""
        by_rows = sorted(self._choice_keys(), key=lambda k: (k.batch_size * k.query_len, k.kind))
        with torch.inference_mode():
            # None where all numbers of sequences to capture are above `MOST_ROWS`.
            for choice in by_rows[-1:]:
                self._choosing(choice)()
            for key in self._keys_of_drafts(self._target.largest)[-1:]:
                self._drafting(key)()

    def choose(self, step: StepInput) -> tuple[Verified, torch.Tensor] | None:
        """The step's tokens and `last_rows`, after the graph of its layers; None if no graph
        chooses them: where the host has a say, or sequences are in their prompts.
        """
        graph, plan = step.graph, step.sample
        if graph is None or not step.decodes or not plan.is_plain or plan.kind is None:
            return None
        key = ChoiceKey(graph.batch_size, graph.query_len, plan.kind)
        if key not in self._choices:
            return None
        kept, count = self._kept_of(graph), len(plan.states)
        self._sampler.update()
        if plan.synthetic is not None:
            kept.accepted[:count] = plan.synthetic.counts
        tokens, accepted, last_rows = (t[:count] for t in self._choices.replay(key))
        return Verified(tokens, tokens, accepted, None, []), last_rows

    def keep(self, graph: GraphKey, last_rows: torch.Tensor) -> None:
        """Pass on the `last_rows` of a step whose tokens no graph chose to that of its drafts."""
        self._kept_of(graph).last_rows[: len(last_rows)] = last_rows

    def release(self) -> None:
        """Drop all graphs."""
        self._target.release()
        self._choices.release()
        if self._drafts is not None:
            self._drafts.release()

    def _choice_keys(self) -> Iterator[ChoiceKey]:
        bound = self._target.plan.context_bounds[0]
        for graph in self._target.keys:
            if graph.bucket.max_context_len == bound and graph.num_rows <= MOST_ROWS:
                for kind in reversed(KINDS):
                    yield ChoiceKey(graph.batch_size, graph.query_len, kind)

    def _draft_keys(self) -> Iterator[DraftKey]:
        for graph in self._target.keys:
            yield from self._keys_of_drafts(graph)

    def _keys_of_drafts(self, graph: GraphKey) -> list[DraftKey]:
        return [] if self._drafts is None else self._drafts.keys_of(graph)

    def _kept_of(self, graph: GraphKey | ChoiceKey) -> _Kept:
        key = graph.batch_size, graph.query_len
        if key not in self._kept:
            device = self._target.plan.device
            numbers = torch.zeros(2, graph.batch_size, dtype=torch.int64, device=device)
            self._kept[key] = _Kept(*numbers.unbind())
        return self._kept[key]

    def _choosing(self, key: ChoiceKey) -> Callable[[], Sequence[torch.Tensor]]:
        """The captured work of a choice -> tokens, accepted drafts and `last_rows`."""
        bucket = Bucket(key.batch_size, self._target.plan.context_bounds[0])
        given = self._inputs.graph_input(bucket, key.query_len)
        ids, positions = given.model_input.input_ids, given.model_input.positions
        every = torch.arange(len(ids), device=ids.device)
        rows = DecodeRows(given.rows, ids, positions, every, given.num_drafts, given.next_token_ids)
        hidden = self._target.output(GraphKey(bucket, key.query_len)).hidden_states
        kept = self._kept_of(key)
        accepted = kept.accepted if self._synthetic and key.query_len > 1 else None
        return lambda: self._sampler.sample(rows, hidden, key.kind, accepted)

    def _drafting(self, key: DraftKey) -> Callable[[], Proposal]:
        """The captured work of drafts."""
        graph = key.target
        given = self._inputs.graph_input(graph.bucket, graph.query_len)
        output, kept = self._target.output(graph), self._kept_of(graph)
        return lambda: self._proposer.propose(
            self._verified(given, output, kept, key.races), key.num_drafts
        )

    def _verified(
        self, given: GraphInput, output: ModelOutput, kept: _Kept, races: bool
    ) -> VerifiedStep:
        """A step of all the graph's sequences; it has metadata of its own in each run."""
        own = given.model_input
        assert given.next_token_ids is not None
        return VerifiedStep(
            [],
            ModelInput(own.input_ids, own.positions, replace(own.attention)),
            output,
            given.next_token_ids,
            kept.last_rows,
            None,
            self._sampler.race(given.rows) if races else None,
        )
