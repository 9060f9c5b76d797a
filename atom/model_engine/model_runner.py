"""`ModelRunner`: build the inputs, run the model, sample and verify, propose drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from atom.batch import (
    LaunchedStep,
    RankStep,
    ScheduledBatch,
    SequenceResult,
    StepOutput,
    StepParts,
)
from atom.graphs.staging import Arriving
from atom.kv_cache.state_pool import NO_STATES, StatePool
from atom.model_engine.step.input_buffers import StepInput
from atom.model_engine.step.input_builder import InputBuilder
from atom.model_engine.step.step_runner import StepRunner
from atom.model_ops.attention.metadata import changed
from atom.sampling.sampler import Sampled, Sampler
from atom.sampling_params import Needs
from atom.spec_decode.draft_policy import DraftNumbers
from atom.spec_decode.drafter import NO_DRAFTS, Drafter, LaunchedDrafts, LookupDrafts
from atom.spec_decode.grammar import NO_GRAMMARS

_NOTHING = ScheduledBatch([], [], [])


def _shift_lookup_drafts(
    results: list[SequenceResult],
    indices: Sequence[int],
    launched: LaunchedDrafts,
    found: LookupDrafts,
    drafts: Sequence[tuple[list[int], str]],
    lost: Sequence[float],
) -> None:
    """Where the next step is launched, drafts that were looked up are for the one behind that.

    Args:
        indices: of the sampled sequences in `results`.
        drafts: those that were merged, and their sources.
        lost: as `tokens_lost_by_overlap` of these.
    """
    columns = launched, found, drafts, lost
    for index, verified, looked_up, (draft_ids, source), tokens in zip(
        indices, *columns, strict=True
    ):
        later = None
        if verified is not None:
            if looked_up is not None and draft_ids:
                later = draft_ids, source
            draft_ids = []
        results[index] = msgspec.structs.replace(
            results[index],
            draft_token_ids=draft_ids,
            drafts_after_next=later,
            tokens_lost_by_overlap=tokens,
        )


class ModelRunner:
    """Runs scheduled batches on one rank. The KV cache is already bound to the model.

    There is one host-to-device copy before the model runs and one device-to-host copy after the
    drafts are made. Grammar masks and token lists of new sequences are copied separately.

    Attributes:
        inputs: copies batches to the device.
        steps: runs what is on the device, op by op or replayed.

    Args:
        publish: called with what other ranks must do, after all that can fail because of a request
            and before the model runs; None when there are no others.
        states: the target's recurrent states.
    """

    def __init__(
        self,
        inputs: InputBuilder,
        steps: StepRunner,
        sampler: Sampler,
        drafter: Drafter,
        publish: Callable[[RankStep], RankStep] | None = None,
        states: StatePool = NO_STATES,
    ) -> None:
        self.inputs = inputs
        self.steps = steps
        self._sampler = sampler
        self._drafter = drafter
        self._publish = publish
        self._states = states
        self._newest = _NOTHING
        # As a decorator it would be made anew in each step.
        self._inference = torch.inference_mode()

    def rehearsing(self, drafter: Drafter) -> ModelRunner:
        """A runner with the same inputs and graphs of the target, that tells no other rank of its
        steps.
        """
        steps = self.steps.without_draft_replay()
        return ModelRunner(self.inputs, steps, self._sampler, drafter)

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Compute the scheduled tokens, sample and verify, and propose the next drafts.

        On a GPU this only launches kernels; nothing waits for them before `collect`.
        """
        with self._inference:
            self._newest = batch
            self._start(batch)
            if not batch.sequences:
                return self._launch_nothing(batch)
            numbers = DraftNumbers()
            if not self._drafter.drafts_after_lookup:
                numbers = self._drafter.begin(batch.num_drafting)
            step = self.inputs.build(batch)
            if self._publish is not None:
                rank_step = self._publish(RankStep.of(batch, numbers.made, step.sample.kind))
                numbers = self._drafter.follow(numbers, rank_step.num_drafts)
            has_grammars = bool(step.sample.needs & Needs.GRAMMAR)
            if self._drafter.drafts_after_lookup or (
                self._drafter.drafts_within_grammars and has_grammars
            ):
                output = self._draft_after_sampling(batch, step, numbers)
                return LaunchedStep(lambda: output)
            done = self.steps.run(batch.sequences, step, numbers.made)
            proposed, parts = done.draft(numbers.made)
            self.inputs.carried.leave(step, done.verified, proposed)
            if self._sampler.failure is not None:
                self._sampler.raise_failure()
            num_made = 0 if proposed is None else len(proposed.tensors)
            arriving = self.steps.send_to_host(proposed, done.verified)
            collect = partial(self._collect, batch, step, arriving, num_made, numbers, parts)
            return LaunchedStep(collect, numbers.made if num_made else 0, self._drafter.source)

    def _launch_nothing(self, batch: ScheduledBatch) -> LaunchedStep:
        """A step without sequences, which other ranks are told of, and other engines wait for."""
        if self._publish is not None:
            self._run_dummy_step(self._publish(RankStep.of(batch, 0)))
        nothing = StepOutput([], self._drafter.lookup.num_tokens)
        return LaunchedStep(lambda: nothing)

    def _collect(
        self,
        batch: ScheduledBatch,
        step: StepInput,
        arriving: Arriving,
        num_made: int,
        numbers: DraftNumbers,
        parts: StepParts,
    ) -> StepOutput:
        """Wait for the tokens and the drafts, whose tensors come first."""
        arrays = arriving()
        made, arrays = arrays[:num_made], arrays[num_made:]
        sampled = self._sampler.take(step.sample, arrays)
        rows = [batch.sequences[i].row for i in step.sample.layout.indices]
        launched: LaunchedDrafts = [None] * len(rows)
        if self._drafter.has_lookup and self._newest is not batch:
            launched = self._launched_drafts(rows, made)
        found = self._look_up(batch, step, launched)
        with self._drafter.grammar_drafts(rows, step.sample.states) as allowed:
            drafts = self._drafter.merge(numbers, rows, found, made, allowed, launched)
        output = self._output(batch, step, sampled, drafts, parts)
        if self.inputs.carried.overlaps and self._drafter.has_lookup:
            indices, lost = step.sample.layout.indices, self._drafter.tokens_lost_by_overlap
            _shift_lookup_drafts(output.sequences, indices, launched, found, drafts, lost)
        return output

    def _launched_drafts(self, rows: Sequence[int], made: Sequence[np.ndarray]) -> LaunchedDrafts:
        """Which drafts of the sampled sequences the step verifies that was launched last, behind
        this one.

        Args:
            made: the tensors of the proposer's drafts, if it made any.
        """
        ahead = {s.row: s for s in self._newest.sequences if s.is_ahead}
        launched: list[list[int] | None] = []
        for i, row in enumerate(rows):
            drafts = None
            if row in ahead:
                drafts = ahead[row].draft_token_ids
                if drafts and not ahead[row].knows_drafts:
                    drafts = made[0][i, : len(drafts)].tolist()
            launched.append(drafts)
        return launched

    def _draft_after_sampling(
        self, batch: ScheduledBatch, step: StepInput, numbers: DraftNumbers
    ) -> StepOutput:
        """The host knows the tokens before drafts are made."""
        done = self.steps.run(batch.sequences, step, 0 if self._drafter.is_at_rest else None)
        sampled = self._sampler.take(step.sample, self.steps.send_to_host(done.verified)())
        found = self._look_up(batch, step)
        if self._drafter.drafts_after_lookup:
            numbers = self._drafter.begin_with(found)
        rows = [batch.sequences[i].row for i in step.sample.layout.indices]
        with self._drafter.grammar_drafts(rows, step.sample.states) as allowed:
            follows = allowed is not NO_GRAMMARS and numbers.made > 0
            guide = allowed.guide(found) if follows else None
            proposed, parts = done.draft(numbers.made, guide)
            made = self.steps.send_to_host(proposed)()
            drafts = self._drafter.merge(numbers, rows, found, made, allowed)
        return self._output(batch, step, sampled, drafts, parts)

    @torch.inference_mode()
    def follow(self, rank_step: RankStep) -> None:
        """This rank's part of a step whose tokens the first rank samples."""
        batch = rank_step.batch
        self._start(batch)
        numbers = self._drafter.follow(DraftNumbers(), rank_step.num_drafts)
        self._run_dummy_step(rank_step)
        if not batch.sequences:
            return
        step = self.inputs.build(batch)
        # Whether logits are edited is known to the first rank alone.
        step = changed(step, sample=changed(step.sample, kind=rank_step.kind))
        done = self.steps.run(batch.sequences, step, numbers.made)
        proposed, _ = done.draft(numbers.made)
        self.inputs.carried.leave(step, done.verified, proposed)

    def _run_dummy_step(self, rank_step: RankStep) -> None:
        """Compute a padding row, and drafts after it, if other engines need this one's experts."""
        if rank_step.is_idle:
            self.steps.run_padding(self.inputs.padding(), rank_step.num_drafts)

    def _start(self, batch: ScheduledBatch) -> None:
        if batch.new or batch.freed_rows:
            self.inputs.images.start(batch)
            self._sampler.forget(batch.freed_rows)
        self._drafter.start(batch)
        if self._states.num_slots:
            self._states.start(batch)

    def _look_up(
        self, batch: ScheduledBatch, step: StepInput, launched: LaunchedDrafts | None = None
    ) -> LookupDrafts:
        plan = step.sample
        sampled = [batch.sequences[i] for i in plan.layout.indices]
        found: LookupDrafts = [None] * len(sampled)
        if self._drafter.has_lookup:
            histories = [(s.prompt_token_ids, s.output_token_ids) for s in plan.states]
            found = self._drafter.look_up([s.row for s in sampled], histories, launched)
        return [
            drafts if sequence.wants_drafts else NO_DRAFTS
            for sequence, drafts in zip(sampled, found, strict=True)
        ]

    def _output(
        self,
        batch: ScheduledBatch,
        step: StepInput,
        sampled: Sampled,
        drafts: Sequence[tuple[list[int], str]],
        parts: StepParts,
    ) -> StepOutput:
        results = [SequenceResult([])] * len(batch.sequences)
        for index, prompt_logprobs in sampled.prompt_logprobs.items():
            results[index] = SequenceResult([], prompt_logprobs=prompt_logprobs)
        columns = (sampled.token_ids, sampled.logprobs, drafts, sampled.failures)
        for index, tokens, logprobs, (draft_ids, source), failure in zip(
            step.sample.layout.indices, *columns, strict=True
        ):
            prompt = sampled.prompt_logprobs.get(index) if sampled.prompt_logprobs else None
            results[index] = SequenceResult(tokens, logprobs, prompt, draft_ids, source, failure)
        images = self.inputs.images
        encoder = images.take_counts() if images.are_read else None
        return StepOutput(results, self._drafter.lookup.num_tokens, parts, encoder)
