"""`ModelRunner`: build the input, run the model, sample, propose; nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from atom.model_engine.batch import (
    ScheduledBatch,
    ScheduledSequence,
    SequenceResult,
    StepOutput,
)
from atom.model_engine.input_builder import build_model_input
from atom.model_engine.messages import TokenLogprobs
from atom.model_engine.sampling_state import SamplingRow, SamplingStates
from atom.model_ops.metadata import ModelOutput, SamplerOutput
from atom.model_ops.sampler import compute_logprobs, sample
from atom.models.base import CausalLM
from atom.spec_decode.base import Proposer

# Prompt logprobs need the logits of every prompt row; this many rows exist at a time.
_PROMPT_LOGPROB_ROWS = 64


class ModelRunner:
    """Executes scheduled batches on one rank. The KV cache is bound to the model already."""

    def __init__(
        self,
        model: CausalLM,
        proposer: Proposer,
        states: SamplingStates,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._proposer = proposer
        self._states = states
        self._block_size = block_size
        self._device = device

    @torch.inference_mode()
    def step(self, batch: ScheduledBatch) -> StepOutput:
        """Compute every scheduled token and sample the sequences that want it."""
        self._states.update(batch.new, batch.finished_ids)
        if not batch.sequences:
            return StepOutput([])
        model_input = build_model_input(batch, self._block_size, self._device)
        output = self._model.forward(model_input)
        prompt_logprobs = self._prompt_logprobs(batch, output)
        sampled = self._sample(batch, output.hidden_states[model_input.logits_indices])
        results: list[SequenceResult] = []
        for sequence, logprobs in zip(batch.sequences, prompt_logprobs, strict=True):
            if not sequence.wants_sample:
                results.append(SequenceResult([], prompt_logprobs=logprobs))
                continue
            token_id, token_logprobs = next(sampled)
            self._states[sequence.id].output_token_ids.append(token_id)
            results.append(SequenceResult([token_id], token_logprobs, logprobs))
        return StepOutput(results)

    def _sample(
        self, batch: ScheduledBatch, hidden_states: torch.Tensor
    ) -> Iterator[tuple[int, list[TokenLogprobs] | None]]:
        """The next token of every sequence that wants one, with its logprobs."""
        states = [self._states[s.id] for s in batch.sequences if s.wants_sample]
        if not states:
            return iter(())
        metadata = self._states.build_metadata([SamplingRow(state) for state in states])
        sampled = sample(self._model.compute_logits(hidden_states), metadata)
        wanted = [state.params.logprobs for state in states]
        logprobs = logprobs_to_host(sampled, wanted)
        return iter(zip(sampled.token_ids.tolist(), logprobs, strict=True))

    def _prompt_logprobs(
        self, batch: ScheduledBatch, output: ModelOutput
    ) -> list[list[TokenLogprobs] | None]:
        """For each sequence, the logprobs of the prompt tokens that its rows predict."""
        results: list[list[TokenLogprobs] | None] = []
        first_row = 0
        for sequence in batch.sequences:
            results.append(self._prompt_logprobs_of(sequence, output.hidden_states, first_row))
            first_row += len(sequence.token_ids)
        return results

    def _prompt_logprobs_of(
        self, sequence: ScheduledSequence, hidden_states: torch.Tensor, first_row: int
    ) -> list[TokenLogprobs] | None:
        state = self._states[sequence.id]
        wanted = state.params.prompt_logprobs
        targets = state.prompt_token_ids[sequence.start + 1 : sequence.context_len + 1]
        # A resumed sequence has outputs: its prompt's logprobs were reported with the first.
        if wanted is None or not targets or state.output_token_ids:
            return None
        logprobs: list[TokenLogprobs] = []
        for start in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
            tokens = targets[start : start + _PROMPT_LOGPROB_ROWS]
            rows = hidden_states[first_row + start : first_row + start + len(tokens)]
            chosen = torch.tensor(tokens, device=self._device)
            columns = compute_logprobs(self._model.compute_logits(rows), chosen, wanted)
            logprobs += [
                TokenLogprobs(ids, values, _ranks(rank, len(ids)))
                for ids, values, rank in zip(*(c.tolist() for c in columns), strict=True)
            ]
        return logprobs


def logprobs_to_host(
    sampled: SamplerOutput, wanted: Sequence[int | None]
) -> list[list[TokenLogprobs] | None]:
    """One entry per row, cut to the number of alternatives that each row wants."""
    if sampled.logprobs is None:
        return [None] * len(wanted)
    assert sampled.logprob_token_ids is not None
    assert sampled.ranks is not None
    columns = (sampled.logprob_token_ids, sampled.logprobs, sampled.ranks)
    rows = zip(wanted, *(c.tolist() for c in columns), strict=True)
    return [
        None if n is None else [TokenLogprobs(ids[: n + 1], values[: n + 1], _ranks(rank, n + 1))]
        for n, ids, values, rank in rows
    ]


def _ranks(chosen: int, count: int) -> list[int]:
    """The chosen token's rank, then those of the most likely tokens in order."""
    return [chosen, *range(1, count)]
