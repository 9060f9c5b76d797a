"""The proposer protocol. "No speculation" is `NullProposer`, not a branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom.model_engine.kv_cache import KVCacheBuilder
from atom.model_ops.metadata import ModelInput, ModelOutput


@dataclass(frozen=True)
class VerifyResult:
    """Attributes:
    token_ids: [B, k + 1] int64; row b holds `num_accepted[b]` accepted drafts, then the
        correction or bonus token; the rest is undefined.
    num_accepted: [B] int64.
    """

    token_ids: torch.Tensor
    num_accepted: torch.Tensor


@dataclass(frozen=True)
class DraftOutput:
    """Attributes:
    token_ids: [B, k] int64, the drafts for the next step.
    """

    token_ids: torch.Tensor


class Proposer(Protocol):
    """Guesses the next tokens of every sequence of a batch.

    Attributes:
        num_lookahead_tokens: drafts per step; the scheduler keeps that many KV slots ready.
        aux_layer_ids: target layers whose input hidden states the proposer reads.
        kv_cache_builder: the proposer's own KV cache, sized with the target's.
    """

    num_lookahead_tokens: int
    aux_layer_ids: tuple[int, ...]
    kv_cache_builder: KVCacheBuilder | None

    def propose(
        self, model_input: ModelInput, model_output: ModelOutput, verified: VerifyResult
    ) -> DraftOutput: ...


class NullProposer:
    """Proposes nothing: every step verifies one row per sequence."""

    num_lookahead_tokens = 0
    aux_layer_ids: tuple[int, ...] = ()
    kv_cache_builder: KVCacheBuilder | None = None

    def propose(
        self, model_input: ModelInput, model_output: ModelOutput, verified: VerifyResult
    ) -> DraftOutput:
        return DraftOutput(verified.token_ids[:, :0])
