"""From logits to tokens: penalties and masks, the choice, and log-probabilities.

A row's token depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from atom.model_ops.kernels.torch import sampling
from atom.model_ops.metadata import SamplerOutput, SamplingMetadata
from atom.model_ops.registry import OpTable

_LOGPROB_ROWS = 64
# Beyond the wanted tokens, so that ties with the last rarely reach the last candidate.
_TIE_ROOM = 64


@dataclass(frozen=True)
class SamplingOps:
    """What chooses tokens on a platform; each as the function of that name in plain torch.

    `choose_tokens` maps scores [R, V] to tokens [R]; `mask_tokens` writes to float32 scores.
    """

    choose_tokens: Callable[[torch.Tensor, SamplingMetadata], torch.Tensor] = sampling.choose_tokens
    mask_tokens: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None] = (
        sampling.mask_tokens
    )

    @classmethod
    def resolve(cls, ops: OpTable, dtype: torch.dtype, vocab_size: int) -> SamplingOps:
        """The implementations for logits [R, vocab_size] of a type."""
        return cls(
            ops.resolve("choose_tokens", dtype, vocab_size=vocab_size),
            ops.resolve("mask_tokens", torch.float32, vocab_size=vocab_size),
        )


TORCH_OPS = SamplingOps()


def sample(
    logits: torch.Tensor, metadata: SamplingMetadata, ops: SamplingOps = TORCH_OPS
) -> SamplerOutput:
    """Choose one token per row; -1 where every token is masked or logits are NaN or +inf.

    The order is: grammar mask, banned tokens, logit bias, repetition, presence and frequency
    penalties; then the argmax of greedy rows, and temperature, min_p, top_k and top_p (over
    what the former two leave) of the others. Equal logits count as ordered by token id, lowest
    first. The logits are not modified. On a GPU the host waits for nothing: whoever brings the
    tokens to the host ends the sequences of rows that have none.

    Args:
        logits: [R, V], any floating point type.

    Raises:
        ValueError: when an option comes without the tensors that it needs.
    """
    token_ids = ops.choose_tokens(_process(logits, metadata, ops), metadata)
    if metadata.num_logprobs is None:
        return SamplerOutput(token_ids)
    chosen = token_ids.clamp(min=0)
    return SamplerOutput(token_ids, *compute_logprobs(logits, chosen, metadata.num_logprobs))


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: [R, V], any floating point type.
        token_ids: [R] int64.
        num_logprobs: n; how many of the most likely tokens to report.

    Returns:
        Token ids [R, 1 + n] int64, the given token first, their log-probabilities in float32,
        and the given tokens' ranks [R] int64: 1 + the number of tokens strictly more likely.
    """
    n = min(num_logprobs, logits.shape[-1])
    parts = [
        _logprobs_of_rows(rows.to(torch.float32).log_softmax(-1), chosen[:, None], n)
        for rows, chosen in zip(
            torch.split(logits, _LOGPROB_ROWS), torch.split(token_ids, _LOGPROB_ROWS), strict=True
        )
    ]
    ids, logprobs, ranks = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, logprobs, ranks


def _logprobs_of_rows(
    logprobs: torch.Tensor, chosen: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = chosen
    if n:
        _, top = sampling.most_likely(logprobs, n + _TIE_ROOM)
        ids = torch.cat((chosen, top[:, :n]), dim=-1)
    own = logprobs.gather(-1, chosen)
    return ids, logprobs.gather(-1, ids), 1 + (logprobs > own).sum(-1)


# --- what is added to or taken from the logits ------------------------------------------


def _process(
    logits: torch.Tensor, metadata: SamplingMetadata, ops: SamplingOps = TORCH_OPS
) -> torch.Tensor:
    """Logits after masks, bias and penalties: float32 if any of them is on."""
    m = metadata
    steps = (m.grammar_mask, m.banned, m.logit_bias, m.repetition, m.presence, m.frequency)
    if all(step is None for step in steps):
        return logits
    scores = logits.to(torch.float32, copy=True)
    if m.grammar_mask is not None:
        _check_grammar_mask(m, *scores.shape)
        ops.mask_tokens(scores, m.grammar_mask, m.grammar_rows)
    if m.banned is not None:
        scores.masked_fill_(m.banned, -torch.inf)
    if m.logit_bias is not None:
        scores.add_(m.logit_bias)
    if m.repetition is not None:
        penalty = torch.where(_seen_tokens(m), m.repetition[:, None], 1.0)
        scores = torch.where(scores > 0, scores / penalty, scores * penalty)
    if m.presence is not None:
        scores.sub_(m.presence[:, None] * (_output_counts(m) > 0))
    if m.frequency is not None:
        scores.sub_(m.frequency[:, None] * _output_counts(m))
    return scores


def _check_grammar_mask(metadata: SamplingMetadata, num_rows: int, vocab_size: int) -> None:
    words, rows = metadata.grammar_mask, metadata.grammar_rows
    assert words is not None
    limited = num_rows if rows is None else rows.shape[0]
    if words.shape != (limited, -(-vocab_size // 32)):
        raise ValueError(
            f"grammar_mask is {list(words.shape)}; {limited} rows of a vocabulary of {vocab_size} "
            f"take {[limited, -(-vocab_size // 32)]}"
        )


def _output_counts(metadata: SamplingMetadata) -> torch.Tensor:
    if metadata.output_counts is None:
        raise ValueError("penalties need output_counts")
    return metadata.output_counts


def _seen_tokens(metadata: SamplingMetadata) -> torch.Tensor:
    if metadata.prompt_mask is None:
        raise ValueError("a repetition penalty needs prompt_mask and output_counts")
    return metadata.prompt_mask | (_output_counts(metadata) > 0)
