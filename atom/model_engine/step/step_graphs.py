"""The graphs of a step that decodes: the target's layers, and what follows them as two more.

The choice of tokens with their verification, and the drafts. The first depends on no context, so
it is captured for each number of sequences and queries only, and the layers, which take longest
to capture, need not be captured for each kind of choice. All inputs are where the graph of the
layers finds its own.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from tqdm import tqdm

from atom.batch import ScheduledSequence, StepParts
from atom.graphs.capture import MOST_ROWS, GraphKey, Work
from atom.graphs.runner import GraphRunner
from atom.kv_cache.memory import PeakOf, estimate_graph_bytes, peak_bytes
from atom.model_engine.step.input_buffers import StepInput
from atom.model_engine.step.input_builder import InputBuilder
from atom.model_engine.step.step_runner import ComputedStep, ProposeOp, StepRunner, TargetStep
from atom.model_ops.attention.metadata import ModelInput
from atom.sampling.plan import KINDS, DecodeRows
from atom.sampling.sampler import Sampler, Verified
from atom.sampling_params import Needs
from atom.spec_decode.proposers.base import Guide, Proposal, Proposer, VerifiedStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kept:
    """What graphs of B sequences with as many queries pass on.

    Attributes:
        last_rows: [B] int64, as in `VerifiedStep`.
        accepted: [B] int64, how many drafts count as accepted if that is synthetic.
    """

    last_rows: torch.Tensor
    accepted: torch.Tensor


class StepGraphs(StepRunner):
    """Captures the graphs of steps, and replays them.

    Args:
        target: the layers' graphs.
        draft_numbers: of drafts to capture the proposer's work for; none if it runs op by op.
        synthetic: whether acceptance is.
    """

    def __init__(
        self,
        target: GraphRunner,
        inputs: InputBuilder,
        sampler: Sampler,
        proposer: Proposer,
        draft_numbers: tuple[int, ...],
        *,
        synthetic: bool,
    ) -> None:
        super().__init__(target.forward, sampler, proposer)
        self._target = target
        self._inputs = inputs
        # Numbers of drafts, and whether some of them are not greedy.
        self._drafts = [(n, s) for n in draft_numbers for s in ((False, True) if n else (False,))]
        self._synthetic = synthetic
        self._captured = target.captured
        self._kept: dict[tuple[int, int], _Kept] = {}

    def run(
        self,
        sequences: Sequence[ScheduledSequence],
        step: StepInput,
        num_drafts: int | None,
    ) -> ComputedStep:
        if step.graph is None:
            return super().run(sequences, step, num_drafts)
        output = self._target.replay(step.graph, len(step.model_input.input_ids))
        drafting = self._key_of_drafts(step, num_drafts)
        chosen = self._replay_choice(step, step.graph)
        verified, last_rows = self._choose(step, output) if chosen is None else chosen
        propose: ProposeOp = self._propose
        draft_sampling = None
        if drafting is None:
            draft_sampling = self._sampler.draft_sampling(step.sample, step.draft_sampling_rows)
        else:  # It reads the options by itself, and the rows where the choice's graph writes them.
            propose = partial(self._replay_drafts, drafting)
            if chosen is None and last_rows is not None:
                self._kept_of(step.graph).last_rows[: len(last_rows)] = last_rows
        target = TargetStep(output, verified, last_rows, draft_sampling)
        parts = StepParts(True, sample=chosen is not None)
        return target.computed(sequences, step, propose, parts)

    def without_draft_replay(self) -> StepRunner:
        runner = copy.copy(self)
        runner._drafts = []
        return runner

    @property
    def num_graphs(self) -> tuple[int, int, int]:
        stages = Counter(key.stage for key in (*self._target.plan.keys, *self._keys()))
        return stages["target"], stages["choose"], stages["draft"]

    def estimate_graph_bytes(self, peak_of: PeakOf = peak_bytes) -> int:
        of_layers, *of_others = self.num_graphs
        layers = partial(self._target.rehearse, self._read)
        return estimate_graph_bytes(layers, self._rehearse, of_layers, sum(of_others), peak_of)

    def _read(self, key: GraphKey) -> Callable[[], ModelInput]:
        return self._inputs.graph_input(key).read

    def capture(self) -> None:
        """Capture all graphs, the layers' first."""
        self._target.capture(self._read)
        started = time.perf_counter()
        keys = self._keys()
        for key in tqdm(keys, desc="Capturing choices and drafts", unit="graph", disable=None):
            if key.stage == "draft":
                self._capture(key, self._drafting(key))
            else:
                self._capture(key, self._choosing(key), self._kept_of(key).last_rows)
        seconds = time.perf_counter() - started
        logger.info("captured %d graphs of choices and drafts in %.1f s", len(keys), seconds)

    @torch.inference_mode()
    def _capture(self, key: GraphKey, work: Work, *last: torch.Tensor) -> None:
        """Args:
        last: where the last results are kept; the others are in memory of their own.
        """
        results = work()
        own = [torch.empty_like(result) for result in results[: len(results) - len(last)]]
        self._captured.capture(key, work, [*own, *last])

    def release(self) -> None:
        self._captured.release()

    def _rehearse(self) -> None:
        """After the layers, run once what needs the most memory, without capturing it."""
        choices = [key for key in self._keys() if key.stage == "choose"]
        with torch.inference_mode():
            # None where all numbers of sequences to capture are above `MOST_ROWS`.
            for key in sorted(choices, key=lambda key: (key.num_rows, key.variant))[-1:]:
                self._choosing(key)()
            for variant in self._drafts[-1:]:
                self._drafting(self._target.plan.largest.behind("draft", variant))()

    def _replay_choice(
        self, step: StepInput, graph: GraphKey
    ) -> tuple[Verified, torch.Tensor] | None:
        """The step's tokens and `last_rows`, after the graph of its layers; None if no graph
        chooses them: where the host has a say, or sequences are in their prompts.
        """
        plan = step.sample
        if not step.is_decode or not plan.samples_on_device or plan.kind is None:
            return None
        key = self._choice_key(graph, plan.kind)
        if key not in self._captured:
            return None
        kept, count = self._kept_of(graph), len(plan.states)
        self._sampler.update_rows()
        if plan.synthetic is not None:
            kept.accepted[:count] = plan.synthetic.counts
        tokens, accepted, last_rows = (t[:count] for t in self._captured.replay(key))
        return Verified(tokens, tokens, accepted, None, []), last_rows

    def _key_of_drafts(self, step: StepInput, num_drafts: int | None) -> GraphKey | None:
        """The graph that makes the step's drafts, if it is known how many there are."""
        if step.graph is None or step.next_token_ids is None or step.sampled is not None:
            return None
        variant = num_drafts, step.sample.rows is not None and bool(num_drafts)
        key = step.graph.behind("draft", variant)
        return key if variant in self._drafts and key in self._captured else None

    def _replay_drafts(
        self, key: GraphKey, view: VerifiedStep, num_drafts: int, guide: Guide | None
    ) -> tuple[Proposal, bool]:
        """The drafts of the graph's first sequences, valid until the next ones."""
        assert guide is None
        drafts = (kept[: len(view.last_rows)] for kept in self._captured.replay(key))
        return Proposal(*drafts), True

    def _choice_key(self, graph: GraphKey, kind: Needs) -> GraphKey:
        bound = self._target.plan.context_bounds[0]
        return GraphKey(graph.batch_size, graph.query_len, bound, "choose", kind)

    def _keys(self) -> list[GraphKey]:
        """What is captured behind the layers, the largest first."""
        layers, bound = self._target.plan.keys, self._target.plan.context_bounds[0]
        of_choices = [k for k in layers if k.max_context_len == bound and k.num_rows <= MOST_ROWS]
        choices = [self._choice_key(key, kind) for key in of_choices for kind in reversed(KINDS)]
        drafts = [key.behind("draft", variant) for key in layers for variant in self._drafts]
        return [*choices, *drafts]

    def _kept_of(self, graph: GraphKey) -> _Kept:
        key = graph.batch_size, graph.query_len
        if key not in self._kept:
            device = self._target.plan.device
            numbers = torch.zeros(2, graph.batch_size, dtype=torch.int64, device=device)
            self._kept[key] = _Kept(*numbers.unbind())
        return self._kept[key]

    def _choosing(self, key: GraphKey) -> Work:
        """The captured work of a choice -> tokens, accepted drafts and `last_rows`."""
        graph_input = self._inputs.graph_input(key)
        ids, positions = graph_input.model_input.input_ids, graph_input.model_input.positions
        places = torch.arange(len(ids), device=ids.device)
        rows = DecodeRows(
            graph_input.rows,
            ids,
            positions,
            places,
            graph_input.num_drafts,
            graph_input.next_token_ids,
        )
        hidden, kind = self._target.output(key).hidden_states, cast(Needs, key.variant)
        kept = self._kept_of(key)
        accepted = kept.accepted if self._synthetic and key.query_len > 1 else None
        return lambda: self._sampler.sample_decode_rows(rows, hidden, kind, accepted)

    def _drafting(self, key: GraphKey) -> Work:
        """The captured work of drafts: of a step of all the graph's sequences."""
        graph_input, output = self._inputs.graph_input(key), self._target.output(key)
        last_rows, following = self._kept_of(key).last_rows, graph_input.next_token_ids
        num_drafts, is_sampled = cast(tuple[int, bool], key.variant)
        assert following is not None

        def propose() -> Sequence[torch.Tensor]:
            # It has metadata of its own in each run.
            attention = replace(graph_input.model_input.attention)
            model_input = replace(graph_input.model_input, attention=attention, mrope_shifts=None)
            draft_sampling = None
            if is_sampled:
                draft_sampling = self._sampler.draft_sampling_of_decode_rows(graph_input.rows)
            step = VerifiedStep([], model_input, output, following, last_rows, None, draft_sampling)
            return self._proposer.propose(step, num_drafts).tensors

        return propose
