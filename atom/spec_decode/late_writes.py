"""Steps that a proposer's cache still lacks, until they are written together."""

from __future__ import annotations

import torch

from atom.model_ops.metadata import AttentionMetadata, ModelInput, ModelOutput
from atom.spec_decode.base import VerifiedStep


class LateWrites:
    """Steps of one token of each sequence, whose drafts nobody asked for.

    Written together they read the proposer's weights once. Each of their tokens is a sequence of
    its own then, which sees the tokens before it.
    """

    def __init__(self) -> None:
        self._steps: list[VerifiedStep] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: VerifiedStep) -> None:
        """Keep a copy of what the proposer reads of a step."""
        given = step.model_input
        model_input = ModelInput(given.input_ids, given.positions.clone(), _copied(given.attention))
        states = step.model_output.aux_hidden_states
        output = ModelOutput(
            step.model_output.hidden_states.clone(), tuple(state.clone() for state in states)
        )
        tokens = step.next_token_ids.clone()
        self._steps.append(VerifiedStep([], model_input, output, tokens, step.last_rows, None))

    def take(self) -> VerifiedStep:
        """All of them, at least one, as one step."""
        steps, self._steps = self._steps, []
        tokens = torch.cat([step.next_token_ids for step in steps])
        inputs = [step.model_input for step in steps]
        outputs = [step.model_output for step in steps]
        aux = zip(*(output.aux_hidden_states for output in outputs), strict=True)
        output = ModelOutput(
            torch.cat([output.hidden_states for output in outputs]),
            tuple(torch.cat(states) for states in aux),
        )
        positions = torch.cat([each.positions for each in inputs])
        attention = _joined([each.attention for each in inputs])
        # No proposer reads the tokens themselves, or a last row where nothing is drafted.
        model_input = ModelInput(tokens, positions, attention)
        return VerifiedStep([], model_input, output, tokens, torch.empty_like(tokens[:0]), None)


def _copied(metadata: AttentionMetadata) -> AttentionMetadata:
    return AttentionMetadata(
        metadata.slot_mapping.clone(),
        metadata.block_tables.clone(),
        metadata.block_counts.clone(),
        metadata.context_lens.clone(),
        metadata.cu_seqlens_q,
        metadata.max_seqlen_q,
        metadata.max_context_len,
        metadata.query_lens_cpu,
        None,
    )


def _joined(parts: list[AttentionMetadata]) -> AttentionMetadata:
    lens = torch.cat([part.context_lens for part in parts])
    return AttentionMetadata(
        torch.cat([part.slot_mapping for part in parts]),
        torch.cat([part.block_tables for part in parts]),
        torch.cat([part.block_counts for part in parts]),
        lens,
        torch.arange(len(lens) + 1, dtype=torch.int32),
        1,
        max(part.max_context_len for part in parts),
        (1,) * len(lens),
        None,
    )
