"""From hidden states to tokens: logits, sampling, verification, logprobs.

A row's token does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from atom.batch import ScheduledBatch, ScheduledSequence
from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.graphs.staging import ReadInPlace, StagingBuffer
from atom.messages import TokenLogprobs
from atom.model_ops.attention.metadata import ModelOutput, SamplingMetadata
from atom.sampling.edits import EditsBuilder, LogitEdits
from atom.sampling.failure import SamplingFailedError
from atom.sampling.logprobs import Logprobs, as_messages, compute_logprobs
from atom.sampling.ops import TORCH_OPS, SamplingOps
from atom.sampling.plan import (
    KINDS,
    DecodeRows,
    PromptRows,
    RowLayout,
    SamplePlan,
    kind_of,
    put_logprob_rows,
    put_penalised,
    put_prompt,
    put_synthetic,
    sampled_rows,
)
from atom.sampling.rows import SamplingRows, SequenceState
from atom.sampling.synthetic import SyntheticAcceptance
from atom.sampling_params import EDITS, Needs

# Prompt logprobs are computed for this many rows at a time, since logits are large.
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
_SLOW_GRAMMAR = (
    "the grammar takes too long to follow after {} tokens; write it with fewer ways to read the "
    "same text, such as repetitions within repetitions"
)


@dataclass(frozen=True)
class Verified(ReadInPlace):
    """The result of sampling and verification, on the device.

    Attributes:
        sampled: [R] int64, a token for each row of logits; -1 where none can be chosen.
        token_ids: [S, k + 1] int64; row s starts with `num_accepted[s]` accepted drafts (what was
            sampled instead, if acceptance is synthetic) and the correction or bonus token; the rest
            is undefined.
        num_accepted: [S] int64.
        logprobs: of the rows that need them.
        prompt_logprobs: one for each sequence that needs them.
    """

    sampled: torch.Tensor
    token_ids: torch.Tensor
    num_accepted: torch.Tensor
    logprobs: Logprobs | None
    prompt_logprobs: list[Logprobs]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors to copy to the host."""
        parts = [] if self.logprobs is None else [self.logprobs]
        logprobs = [t for part in (*parts, *self.prompt_logprobs) for t in part.tensors]
        return [self.token_ids, self.num_accepted, *logprobs]


class Sampled(msgspec.Struct, frozen=True):
    """The results of a step's S sampled sequences, on the host.

    Attributes:
        token_ids: accepted drafts and the correction or bonus token, up to a failure.
        num_accepted: number of accepted drafts.
        failures: why a sequence cannot continue; None if it can.
        logprobs: of each sequence's tokens; None if not requested.
        prompt_logprobs: by batch index.
    """

    token_ids: list[list[int]]
    num_accepted: list[int]
    failures: list[str | None]
    logprobs: list[list[TokenLogprobs] | None]
    prompt_logprobs: dict[int, list[TokenLogprobs]]


class Sampler:
    """From hidden states to tokens.

    All ranks of a group compute the logits. The first chooses the tokens, and the others get them;
    greedy steps need neither: the ranks find the tokens together.

    Each step calls `lay_out`, then, after `staging.send`, `sample`, and `take` once the results are
    on the host.

    Attributes:
        failure: of choosing the step's tokens, which other ranks wait for; `raise_failure` raises
            it.

    Args:
        synthetic: accepts drafts at random; None to accept those that equal the samples.
        choose_greedily: the tokens of greedy rows as all ranks find them, from hidden states; None
            on a rank that has all logits.
        ragged_most: as in `RowLayout.of`.
    """

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        rows: SamplingRows,
        vocab_size: int,
        device: torch.device,
        ops: SamplingOps = TORCH_OPS,
        group: ParallelGroup = SINGLE,
        *,
        others_wait: bool = False,
        synthetic: SyntheticAcceptance | None = None,
        choose_greedily: Callable[[torch.Tensor], torch.Tensor] | None = None,
        ragged_most: int = 0,
    ) -> None:
        self._ragged_most = ragged_most
        self._compute_logits = compute_logits
        self._group = group
        self._others_wait = others_wait
        self._choose_greedily = choose_greedily
        self._synthetic = synthetic
        self.failure: Exception | None = None
        self._rows = rows
        self._edits = EditsBuilder(rows, vocab_size, device)
        self._ops = ops

    def lay_out(
        self,
        batch: ScheduledBatch,
        rows: np.ndarray,
        token_ids: np.ndarray,
        positions: np.ndarray,
        ends: np.ndarray,
        staging: StagingBuffer,
    ) -> SamplePlan:
        """Write the sampling inputs of a step into the staging buffer.

        Args:
            rows: [B], the sequences' rows.
            token_ids, positions: [T] of the forward pass.
            ends: [B], end of each sequence's tokens in T.
        """
        self._rows.learn(batch.new, staging)
        sequences = batch.sequences
        layout = RowLayout.of(sequences, ends, self._ragged_most)
        everyone = self._rows.needs[rows]
        rows, needs = rows[layout.indices], everyone[layout.indices]
        together = Needs(int(np.bitwise_or.reduce(needs)))
        is_random = bool(together & Needs.TEMPERATURE)
        states = self._rows.states(rows)
        table = layout.table()
        # As graphs do: filters that are off change nothing, and each set has kernels of its own.
        filters = kind_of(together)
        return SamplePlan(
            layout,
            states,
            logits_indices=staging.put(layout.logits_indices),
            table=None if table is None else staging.put(table),
            drafts=staging.put(layout.drafts(token_ids)) if layout.most else None,
            # A row predicts the token at the next position.
            rows=staging.put(rows[layout.owners]) if is_random else None,
            positions=staging.put(positions[layout.logits_indices] + 1) if is_random else None,
            needs=together,
            create_edits=self._put_edits(sequences, layout, states, needs & EDITS, staging),
            logprob_rows=put_logprob_rows(layout, states, needs & Needs.LOGPROBS, staging),
            penalised=put_penalised(states, needs & Needs.PENALTIES, staging),
            prompts=self._put_prompts(sequences, everyone & Needs.PROMPT_LOGPROBS, ends, staging),
            synthetic=(
                put_synthetic(self._synthetic, layout, states, positions, staging)
                if self._synthetic is not None and layout.most
                else None
            ),
            filters=filters,
            kind=None if together & (Needs.LOGPROBS | EDITS) else filters,
        )

    def lay_out_again(
        self, plan: SamplePlan, sequences: Sequence[ScheduledSequence], staging: StagingBuffer
    ) -> SamplePlan | None:
        """The plan of another step of the same sequences, all sampled and with as many drafts.

        Returns:
            None if nothing is edited any more.
        """
        if plan.create_edits is None:
            return plan
        edited = np.array([state.needs & EDITS for state in plan.states])
        edits = self._put_edits(sequences, plan.layout, plan.states, edited, staging)
        return None if edits is None else replace(plan, create_edits=edits)

    def forget(self, rows: Sequence[int]) -> None:
        """Remove the sequences of these rows."""
        self._rows.forget(rows)

    def logits(self, plan: SamplePlan, output: ModelOutput) -> torch.Tensor:
        """[R, V] float32, of the rows that are sampled."""
        return self._compute_logits(output.at(plan.logits_indices))

    def sample(
        self, plan: SamplePlan, output: ModelOutput, logits: torch.Tensor | None = None
    ) -> Verified:
        """Sample every row of logits, and verify the drafts.

        Args:
            logits: if they are computed already, on a rank that is alone.
        """
        self._rows.update()
        in_parts = [self._prompt_logprobs(output.hidden_states, prompt) for prompt in plan.prompts]
        prompt_logprobs = [Logprobs.joined(parts) for parts in in_parts if parts]
        if not plan.states:
            none = plan.logits_indices
            return Verified(none, none.view(0, 1), none, None, prompt_logprobs)
        if logits is None:
            sampled, logprobs = self._choose_together(plan, output)
        else:
            sampled, logprobs = self._choose(plan, logits)
        tokens, accepted = self._ops.verify_drafts(sampled, plan.drafts, plan.table, None)
        if plan.synthetic is not None:
            accepted = plan.synthetic.counts
        if plan.penalised is not None:
            indices, slots = plan.penalised
            self._rows.counts.add(slots, tokens[indices], accepted[indices] + 1)
        return Verified(sampled, tokens, accepted, logprobs, prompt_logprobs)

    def update_rows(self) -> None:
        """Write new sequences' options to the device, after `staging.send`, as `sample` does."""
        self._rows.update()

    def sample_decode_rows(
        self,
        rows: DecodeRows,
        hidden_states: torch.Tensor,
        kind: Needs,
        accepted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sample and verify rows without a plan of the host's, for a graph to capture.

        Args:
            hidden_states: [T, hidden].
            kind: one of `KINDS`.
            accepted: [B] int64, how many drafts count as accepted; None if the samples decide.

        Returns:
            Tokens [B, n] and accepted drafts [B], as in `Verified`; and [B] int64, the row from
            which each newest token was sampled.
        """
        query_len = rows.query_len
        sampled = self._choose_decode_rows(rows, hidden_states, kind)
        tokens, matching = sampled[:, None], rows.num_drafts  # which is 0
        if query_len > 1:
            drafts = rows.input_ids.view(-1, query_len)[:, 1:]
            # Padding may match, too.
            tokens, matching = self._ops.verify_drafts(sampled, drafts, None, rows.num_drafts)
        accepted = matching if accepted is None else accepted
        if rows.next_token_ids is not None:
            last_rows = self._ops.place_samples(
                rows.next_token_ids, rows.places, sampled, accepted, None
            )
            return tokens, accepted, last_rows
        if query_len == 1:
            return tokens, accepted, rows.places
        return tokens, accepted, rows.places[::query_len] + accepted

    def draft_sampling_of_decode_rows(self, rows: torch.Tensor) -> SamplingMetadata:
        """What drafts of `rows` [B] int64 are chosen with, some of which are not greedy."""
        return self._rows.metadata(rows, None, KINDS[-1], self._ops.sampling_options)

    def _choose_decode_rows(
        self, rows: DecodeRows, hidden_states: torch.Tensor, kind: Needs
    ) -> torch.Tensor:
        """[T] int64, on all ranks what the first one chooses."""
        if not kind and self._choose_greedily is not None:
            return self._choose_greedily(hidden_states)
        logits = self._compute_logits(hidden_states)
        if self._group.rank:
            return self._group.broadcast(torch.empty_like(rows.input_ids))
        options = SamplingMetadata()
        if kind:
            positions, gather = rows.positions + 1, self._ops.sampling_options
            options = self._rows.metadata(rows.rows, positions, kind, gather, rows.query_len)
        return self._group.broadcast(self._ops.choose_tokens(logits, options))

    def place(
        self, plan: SamplePlan, verified: Verified, next_token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Write the sampled tokens behind the rows of the forward pass that they follow.

        Args:
            next_token_ids: [T] int64. It gets 0 where no token could be chosen: the sequence ends,
                and its drafts are unused.

        Returns:
            [S] int64: the row from which each newest token was sampled.
        """
        return self._ops.place_samples(
            next_token_ids,
            plan.logits_indices,
            verified.sampled,
            verified.num_accepted,
            plan.table,
        )

    def draft_sampling(
        self, plan: SamplePlan, rows: torch.Tensor | None
    ) -> SamplingMetadata | None:
        """What drafts that follow the step are chosen with, as in `VerifiedStep`.

        Args:
            rows: [S] int64, of the sampled sequences; None when all are greedy.
        """
        if rows is None:
            return None
        return self._rows.metadata(rows, None, plan.filters, self._ops.sampling_options)

    def _choose_together(
        self, plan: SamplePlan, output: ModelOutput
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """The tokens [R] int64 on every rank, and on the first the logprobs.

        If choosing fails while other ranks wait, the step goes on with no tokens, since they are in
        the middle of it; `raise_failure` raises the error afterwards.
        """
        if self._choose_greedily is not None and plan.is_greedy:
            return self._choose_greedily(output.at(plan.logits_indices)), None
        logits = self._compute_logits(output.at(plan.logits_indices))
        if not self._others_wait:
            return self._choose(plan, logits)
        sampled, logprobs = plan.logits_indices.new_full((len(logits),), -1), None
        if self._group.rank == 0:
            try:
                sampled, logprobs = self._choose(plan, logits)
            except Exception as error:
                self.failure = error
        return self._group.broadcast(sampled), logprobs

    def _choose(
        self, plan: SamplePlan, logits: torch.Tensor
    ) -> tuple[torch.Tensor, Logprobs | None]:
        gather = self._ops.sampling_options
        metadata = self._rows.metadata(plan.rows, plan.positions, plan.filters, gather)
        if plan.create_edits is None:
            sampled = self._ops.choose_tokens(logits, metadata)
        else:
            edits = plan.create_edits()
            sampled = edits.choose(logits, metadata, self._rows.counts, self._ops)
        if plan.logprob_rows is None:
            return sampled, None
        rows, wanted = plan.logprob_rows
        chosen = sampled[rows].clamp(min=0)
        return sampled, compute_logprobs(logits[rows], chosen, max(wanted))

    def raise_failure(self) -> None:
        """Call once all ranks have finished a step with a `failure`.

        Raises:
            SamplingFailedError: when choosing the step's tokens failed.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            raise SamplingFailedError(failure) from failure

    def take(self, plan: SamplePlan, arrays: Sequence[np.ndarray]) -> Sampled:
        """Record the sampled tokens in the sequences' states.

        Args:
            arrays: `Verified.tensors` as host arrays.
        """
        remaining = iter(arrays)
        tokens, accepted = next(remaining).tolist(), next(remaining).tolist()
        token_ids = [row[: count + 1] for row, count in zip(tokens, accepted, strict=True)]
        failures: list[str | None] = [None] * len(token_ids)
        for s, (state, good) in enumerate(zip(plan.states, token_ids, strict=True)):
            num_good = len(good)
            if -1 in good:
                num_good = good.index(-1)
                failures[s] = _NO_TOKEN.format(len(state.output_token_ids) + num_good)
                del good[num_good:]
            admitted = state.extend(good)
            if admitted < num_good:
                num_outputs = len(state.output_token_ids) - num_good
                slow = state.grammar is not None and state.grammar.is_too_slow
                message = _SLOW_GRAMMAR if slow else _NO_GRAMMATICAL_TOKEN
                failures[s] = message.format(num_outputs + admitted)
                del good[admitted:]
        logprobs: list[list[TokenLogprobs] | None] = [None] * len(token_ids)
        if plan.logprob_rows is not None:
            logprobs = self._take_logprobs(plan, plan.logprob_rows[1], token_ids, remaining)
        return Sampled(
            token_ids,
            accepted,
            failures,
            logprobs,
            {
                p.index: as_messages(
                    [next(remaining) for _ in range(3)], [p.wanted] * p.num_targets
                )
                for p in plan.prompts
            },
        )

    def _put_edits(
        self,
        sequences: Sequence[ScheduledSequence],
        layout: RowLayout,
        states: Sequence[SequenceState],
        edited: np.ndarray,
        staging: StagingBuffer,
    ) -> Callable[[], LogitEdits] | None:
        chosen = np.flatnonzero(edited).tolist()
        if not chosen:
            return None
        return self._edits.build(sampled_rows(sequences, layout, states, chosen), staging)

    def _put_prompts(
        self,
        sequences: Sequence[ScheduledSequence],
        wanted: np.ndarray,
        ends: np.ndarray,
        staging: StagingBuffer,
    ) -> list[PromptRows]:
        chosen = np.flatnonzero(wanted).tolist()
        return [
            prompt
            for i in chosen
            if (prompt := put_prompt(i, sequences[i], self._rows[sequences[i].row], ends, staging))
        ]

    def _prompt_logprobs(self, hidden_states: torch.Tensor, prompt: PromptRows) -> list[Logprobs]:
        """Of a prompt's tokens, in parts; empty on a rank that only takes part in the logits."""
        parts = []
        for start in range(0, prompt.num_targets, _PROMPT_LOGPROB_ROWS):
            end = min(start + _PROMPT_LOGPROB_ROWS, prompt.num_targets)
            logits = self._compute_logits(hidden_states[prompt.first + start : prompt.first + end])
            if self._group.rank == 0:
                parts.append(compute_logprobs(logits, prompt.targets[start:end], prompt.wanted))
        return parts

    def _take_logprobs(
        self,
        plan: SamplePlan,
        wanted: list[int],
        token_ids: list[list[int]],
        arrays: Iterator[np.ndarray],
    ) -> list[list[TokenLogprobs] | None]:
        """The logprobs of each sampled sequence's tokens; None where nobody asked."""
        results: list[list[TokenLogprobs] | None] = [None] * len(token_ids)
        rows = iter(as_messages([next(arrays) for _ in range(3)], wanted))
        for s, tokens in enumerate(token_ids):
            if plan.states[s].params.logprobs is not None:
                of_rows = [next(rows) for _ in range(plan.layout.num_drafts[s] + 1)]
                results[s] = of_rows[: len(tokens)]
        return results
