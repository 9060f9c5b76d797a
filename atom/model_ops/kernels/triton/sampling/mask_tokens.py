"""Grammar masks on logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024


@triton.jit
def _mask(
    scores_ptr, words_ptr, rows_ptr, row_stride, vocab_size, words_per_row,
    ALL_ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: masks, tiles of the vocabulary. Scores are written without being read."""
    mask = tl.program_id(0).to(tl.int64)
    row = mask
    if not ALL_ROWS:
        row = tl.load(rows_ptr + mask)
    token_ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token = token_ids < vocab_size
    words = tl.load(words_ptr + mask * words_per_row + token_ids // 32, mask=is_token, other=-1)
    refused = ((words >> (token_ids % 32)) & 1) == 0
    scores = tl.full([TILE], float("-inf"), tl.float32)
    tl.store(scores_ptr + row * row_stride + token_ids, scores, mask=is_token & refused)


def mask_tokens(scores: torch.Tensor, words: torch.Tensor, rows: torch.Tensor | None) -> None:
    """Set the scores [R, V] float32 of tokens that a mask does not allow to -inf, in place.

    Args:
        words: [G, ceil(V / 32)] int32; bit t % 32 of word t // 32 allows token t.
        rows: [G] int64, different rows of the scores; None when G is R.

    Raises:
        ValueError: when shapes or data types do not fit.
    """
    num_rows, vocab_size = scores.shape
    count = num_rows if rows is None else rows.shape[0]
    if (
        scores.dtype is not torch.float32
        or scores.stride(1) != 1
        or words.shape != (count, triton.cdiv(vocab_size, 32))
        or not words.is_contiguous()
    ):
        raise ValueError(
            f"mask_tokens wants scores [R, V] float32 and masks [{count}, ceil(V / 32)]; given "
            f"scores {list(scores.shape)} {scores.dtype}, masks {list(words.shape)}"
        )
    if count == 0:
        return
    tile = min(triton.next_power_of_2(vocab_size), _TILE)
    _mask[(count, triton.cdiv(vocab_size, tile))](
        scores,
        words,
        words if rows is None else rows,
        scores.stride(0),
        vocab_size,
        words.shape[1],
        ALL_ROWS=rows is None,
        TILE=tile,
        num_warps=4,
    )
