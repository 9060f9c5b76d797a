"""`ModelRunner`: build the input, run the model, sample and verify, propose; nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atom.batch import (
    ScheduledBatch,
    ScheduledSequence,
    SequenceResult,
    StepOutput,
)
from atom.graphs.runner import ForwardRunner
from atom.messages import TokenLogprobs
from atom.model_engine.input_builder import build_model_input
from atom.model_ops.metadata import ModelInput, ModelOutput, SamplerOutput
from atom.models.base import CausalLM
from atom.sampling.sampler import (
    TORCH_OPS,
    SamplingOps,
    compute_logprobs,
    sample,
)
from atom.sampling.state import SamplingRow, SamplingStates
from atom.sampling.verify import NO_DRAFT, VerifyResult, verify
from atom.spec_decode.base import Verification, VerifiedStep
from atom.spec_decode.drafter import Drafter

# Prompt logprobs need the logits of every prompt row; this many rows exist at a time.
_PROMPT_LOGPROB_ROWS = 64
_NO_TOKEN = (
    "no token can be chosen after {} tokens: min_tokens, stop_token_ids and structured_output "
    "exclude all of them, or the model's logits are NaN or infinite; relax the former, or run the "
    "model in a wider dtype"
)
_NO_GRAMMATICAL_TOKEN = (
    "the grammar allows no token of this model after {} tokens; rewrite it so that every text "
    "that it begins can be completed"
)


@dataclass(frozen=True)
class SampleLayout:
    """How the R rows of logits belong to the S sequences that are sampled.

    Attributes:
        indices: for each sampled sequence its place in the batch.
        rows: [S, k + 1] int64 rows of logits; short sequences repeat their last.
        drafts: [S, k] int64, padded with `NO_DRAFT`.
    """

    indices: list[int]
    rows: torch.Tensor
    drafts: torch.Tensor

    @classmethod
    def of(cls, batch: ScheduledBatch, device: torch.device) -> SampleLayout:
        indices = [i for i, s in enumerate(batch.sequences) if s.wants_sample]
        most = max((batch.sequences[i].num_drafts for i in indices), default=0)
        rows = np.zeros((len(indices), most + 1), dtype=np.int64)
        drafts = np.full((len(indices), most), NO_DRAFT, dtype=np.int64)
        first = 0
        for s, index in enumerate(indices):
            count = batch.sequences[index].num_drafts
            rows[s] = first + np.minimum(np.arange(most + 1), count)
            drafts[s, :count] = batch.sequences[index].draft_token_ids
            first += count + 1
        return cls(indices, torch.from_numpy(rows).to(device), torch.from_numpy(drafts).to(device))


def bring_to_host(verified: VerifyResult) -> list[list[int]]:
    """For each sampled sequence the number of accepted drafts, then its k + 1 samples.

    The one copy of a step that the host waits for.
    """
    columns: list[list[int]] = torch.cat(
        (verified.num_accepted[:, None], verified.token_ids), dim=1
    ).tolist()
    return columns


class ModelRunner:
    """Executes scheduled batches on one rank. The KV cache is bound to the model already."""

    def __init__(
        self,
        model: CausalLM,
        forward: ForwardRunner,
        drafter: Drafter,
        states: SamplingStates,
        block_size: int,
        device: torch.device,
        sampling_ops: SamplingOps = TORCH_OPS,
    ) -> None:
        self._model = model
        self._forward = forward
        self._drafter = drafter
        self._states = states
        self._block_size = block_size
        self._device = device
        self._sampling_ops = sampling_ops

    @torch.inference_mode()
    def step(self, batch: ScheduledBatch) -> StepOutput:
        """Compute every scheduled token, sample and verify, and propose the next drafts."""
        started = time.perf_counter()
        self._states.update(batch.new, batch.finished_ids)
        if not batch.sequences:
            return StepOutput([])
        model_input = build_model_input(batch, self._block_size, self._device)
        output = self._forward.run(model_input)
        prompt_logprobs = self._prompt_logprobs(batch, output)
        layout = SampleLayout.of(batch, self._device)
        sampled = self._sample(batch, layout, output.hidden_states[model_input.logits_indices])
        verified = verify(sampled.token_ids[layout.rows], layout.drafts)
        columns = bring_to_host(verified)
        token_ids, failures = self._append(batch, layout, columns)
        finished = (model_input, output, sampled, verified, [row[0] for row in columns])
        proposal = self._drafter.draft(self._verified_step(batch, layout, *finished, started))
        logprobs = self._logprobs(batch, layout, sampled, token_ids)
        results = [SequenceResult([], prompt_logprobs=p) for p in prompt_logprobs]
        for s, index in enumerate(layout.indices):
            results[index] = SequenceResult(
                token_ids[s],
                logprobs[s],
                prompt_logprobs[index],
                proposal.token_ids[s],
                proposal.sources[s],
                failures[s],
            )
        return StepOutput(results)

    def _sample(
        self, batch: ScheduledBatch, layout: SampleLayout, hidden_states: torch.Tensor
    ) -> SamplerOutput:
        """Sample every row of logits from the target's processed distribution."""
        rows = [
            SamplingRow(self._states[sequence.id], sequence.draft_token_ids[:j])
            for sequence in (batch.sequences[i] for i in layout.indices)
            for j in range(sequence.num_drafts + 1)
        ]
        if not rows:
            return SamplerOutput(torch.empty(0, dtype=torch.int64, device=self._device))
        metadata = self._states.build_metadata(rows)
        return sample(self._model.compute_logits(hidden_states), metadata, self._sampling_ops)

    def _append(
        self, batch: ScheduledBatch, layout: SampleLayout, columns: list[list[int]]
    ) -> tuple[list[list[int]], list[str | None]]:
        """Remember the verified tokens.

        Returns:
            For each sampled sequence its tokens, up to the first row without an admissible one
            or as far as its grammar admits them, and why it cannot go on after them.
        """
        token_ids: list[list[int]] = []
        failures: list[str | None] = []
        for index, row in zip(layout.indices, columns, strict=True):
            state = self._states[batch.sequences[index].id]
            num_outputs = len(state.output_token_ids)
            tokens = row[1 : row[0] + 2]
            failure = None
            if tokens[-1] < 0:
                del tokens[-1]
                failure = _NO_TOKEN.format(num_outputs + len(tokens))
            count = state.extend(tokens)
            if count < len(tokens):
                failure = _NO_GRAMMATICAL_TOKEN.format(num_outputs + count)
            token_ids.append(tokens[:count])
            failures.append(failure)
        return token_ids, failures

    def _verified_step(
        self,
        batch: ScheduledBatch,
        layout: SampleLayout,
        model_input: ModelInput,
        output: ModelOutput,
        sampled: SamplerOutput,
        verified: VerifyResult,
        counts: list[int],
        started: float,
    ) -> VerifiedStep:
        next_token_ids = model_input.input_ids.roll(-1)
        ends = model_input.attention.cu_seqlens_q[1:].long() - 1
        chunks = [(i, s.successor_token) for i, s in enumerate(batch.sequences)]
        middle = [(i, token) for i, token in chunks if token is not None]
        if middle:
            places, tokens = torch.tensor(middle, device=self._device).T
            next_token_ids[ends[places]] = tokens
        # A drafter embeds every row's token, also those of sequences that end here.
        next_token_ids[model_input.logits_indices] = sampled.token_ids.clamp(min=0)
        sequences = [batch.sequences[i] for i in layout.indices]
        states = [self._states[sequence.id] for sequence in sequences]
        accepted = layout.rows.gather(1, verified.num_accepted[:, None])[:, 0]
        return VerifiedStep(
            model_input=model_input,
            model_output=output,
            next_token_ids=next_token_ids,
            sequence_ids=[sequence.id for sequence in batch.sequences],
            last_rows=model_input.logits_indices[accepted],
            sequence_indices=layout.indices,
            histories=[(s.prompt_token_ids, s.output_token_ids) for s in states],
            verifications=[
                Verification(s.draft_source, s.num_drafts, count)
                for s, count in zip(sequences, counts, strict=True)
            ],
            num_drafts=0,
            started=started,
        )

    def _logprobs(
        self,
        batch: ScheduledBatch,
        layout: SampleLayout,
        sampled: SamplerOutput,
        token_ids: list[list[int]],
    ) -> list[list[TokenLogprobs] | None]:
        """For each sampled sequence, the logprobs of the tokens that were kept."""
        if sampled.logprobs is None:
            return [None] * len(layout.indices)
        assert sampled.logprob_token_ids is not None
        assert sampled.ranks is not None
        columns = (sampled.logprob_token_ids, sampled.logprobs, sampled.ranks)
        rows = iter(zip(*(column.tolist() for column in columns), strict=True))
        results: list[list[TokenLogprobs] | None] = []
        for index, tokens in zip(layout.indices, token_ids, strict=True):
            sequence = batch.sequences[index]
            own = [next(rows) for _ in range(sequence.num_drafts + 1)]
            wanted = self._states[sequence.id].params.logprobs
            results.append(
                None if wanted is None else [_cut(wanted, *row) for row in own[: len(tokens)]]
            )
        return results

    def _prompt_logprobs(
        self, batch: ScheduledBatch, output: ModelOutput
    ) -> list[list[TokenLogprobs] | None]:
        """For each sequence, the logprobs of the prompt tokens that its rows predict."""
        results: list[list[TokenLogprobs] | None] = []
        first_row = 0
        for sequence in batch.sequences:
            rows = output.hidden_states[first_row : first_row + len(sequence.token_ids)]
            results.append(self._prompt_logprobs_of(sequence, rows))
            first_row += len(sequence.token_ids)
        return results

    def _prompt_logprobs_of(
        self, sequence: ScheduledSequence, hidden_states: torch.Tensor
    ) -> list[TokenLogprobs] | None:
        state = self._states[sequence.id]
        wanted = state.params.prompt_logprobs
        # A resumed sequence has outputs: its prompt's logprobs were reported with the first.
        if wanted is None or state.output_token_ids:
            return None
        targets = state.prompt_token_ids[sequence.start + 1 : sequence.context_len + 1]
        logprobs: list[TokenLogprobs] = []
        for start in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
            chosen = torch.tensor(targets[start : start + _PROMPT_LOGPROB_ROWS])
            logits = self._model.compute_logits(hidden_states[start : start + len(chosen)])
            columns = compute_logprobs(logits, chosen.to(self._device), wanted)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            logprobs += [_cut(wanted, *row) for row in rows]
        return logprobs


def _cut(wanted: int, ids: Sequence[int], values: Sequence[float], rank: int) -> TokenLogprobs:
    """The chosen token and the `wanted` most likely ones, whose ranks are their order."""
    count = min(wanted + 1, len(ids))
    return TokenLogprobs(list(ids[:count]), list(values[:count]), [rank, *range(1, count)])
