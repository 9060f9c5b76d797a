"""Which token a draft proposes: the race of `choose_tokens`, among a draft's scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.triton.sampling.choose_tokens import run_race
from atom.model_ops.kernels.triton.sampling.scores import (
    INT_MAX,
    load_scores,
    read_options,
    row_maximum,
    score_of,
    weights_of,
)


@triton.jit
def _drafts(
    scores_ptr,
    winners_ptr,
    maxima_ptr,
    sums_ptr,
    temperature_ptr,
    ids_ptr,
    drafts_ptr,
    confidences_ptr,
    row_stride,
    vocab_size,
    num_parts,
    scale,
    RANDOM: tl.constexpr,
    IDS: tl.constexpr,
    CONFIDENT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    packed = tl.load(winners_ptr + row * num_parts + parts, mask=is_part, other=-(2**63))
    winner = ((tl.max(packed, axis=0) & INT_MAX) ^ INT_MAX).to(tl.int32)
    draft = winner
    if IDS:
        draft = tl.load(ids_ptr + winner)
    tl.store(drafts_ptr + row, draft.to(tl.int64))
    if CONFIDENT:
        total = tl.sum(tl.load(sums_ptr + row * num_parts + parts, mask=is_part, other=0.0), axis=0)
        largest, is_finite = row_maximum(maxima_ptr, row, num_parts, PARTS)
        temperature = total * 0.0 + 1.0
        if RANDOM:
            given, _min_p = read_options(temperature_ptr, temperature_ptr, row, scale, False)
            temperature = tl.where(given > 0, given, 1.0)
        own = load_scores(scores_ptr + row * row_stride, winner, vocab_size)
        weight = weights_of(own, score_of(largest), temperature, 0.0)
        tl.store(confidences_ptr + row, tl.where(is_finite, weight / total, 0.0))


def choose_drafts(
    scores: torch.Tensor,
    metadata: SamplingMetadata,
    token_ids: torch.Tensor | None,
    scale: float,
    ahead: int,
    confident: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the op in plain torch, which has the arguments.

    Raises:
        ValueError: when temperatures are given without seeds or positions.
    """
    num_rows, vocab_size = scores.shape
    drafts = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    confidences = scores.new_empty(num_rows, dtype=torch.float32) if confident else None
    if num_rows:
        result = run_race(scores, metadata, token_ids, scale, ahead, confident)
        _drafts[(num_rows,)](
            result.scores,
            result.winners,
            result.maxima,
            result.sums,
            drafts if metadata.temperature is None else metadata.temperature,
            drafts if token_ids is None else token_ids,
            drafts,
            drafts if confidences is None else confidences,
            result.scores.stride(0),
            vocab_size,
            result.num_parts,
            scale,
            RANDOM=metadata.temperature is not None,
            IDS=token_ids is not None,
            CONFIDENT=confident,
            PARTS=result.num_columns,
            num_warps=1,
        )
    return drafts, confidences
