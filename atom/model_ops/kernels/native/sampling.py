"""Sampling: masks, the largest, and the race, each in as few passes over the scores as it needs."""

from __future__ import annotations

import torch

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.native.bindings import Kernels, mismatch, num_threads

_mask = Kernels("mask_tokens", "3P4q")
_argmax = Kernels("argmax", "2P3q")
_choose = Kernels("choose_tokens", "10P5qd")

# Of temperature, top_k, top_p, min_p, seeds and positions.
_OPTION_TYPES = (
    torch.float32,
    torch.int32,
    torch.float32,
    torch.float32,
    torch.int64,
    torch.int64,
)


def mask_tokens(scores: torch.Tensor, words: torch.Tensor, rows: torch.Tensor | None) -> None:
    """Set the scores [R, V] float32 of tokens that a mask does not allow to -inf, in place.

    Args:
        words: [G, ceil(V / 32)] int32; bit t % 32 of word t // 32 allows token t.
        rows: [G] int64, different rows of the scores; None when G is R.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: for a row outside the scores.
    """
    num_rows, vocab_size = scores.shape
    count = num_rows if rows is None else rows.numel()
    if (
        scores.dtype is not torch.float32
        or words.dtype is not torch.int32
        or words.shape != (count, -(-vocab_size // 32))
        or not (scores.is_contiguous() and words.is_contiguous())
    ):
        raise mismatch("mask_tokens", scores=scores, words=words)
    if rows is not None and (rows.dtype is not torch.int64 or not rows.is_contiguous()):
        raise mismatch("mask_tokens", scores=scores, rows=rows)
    rows_at = 0 if rows is None else rows.data_ptr()
    pointers = scores.data_ptr(), words.data_ptr(), rows_at
    if wrong := _mask(None, *pointers, count, num_rows, vocab_size, num_threads()):
        assert rows is not None
        raise IndexError(f"row {int(rows[wrong - 1])} of {num_rows} rows of scores")


def argmax(scores: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The token whose score is the largest of each row of scores [R, V] float32: [R] int64. NaN is
    largest, and of equal scores the first. `token_ids` [V] int64 are those of the scores.

    Raises:
        ValueError: when the data type does not fit.
    """
    num_rows, vocab_size = scores.shape
    if scores.dtype is not torch.float32 or not scores.is_contiguous() or not vocab_size:
        raise mismatch("argmax", scores=scores)
    largest = scores.new_empty(num_rows, dtype=torch.int64)
    _argmax(None, scores.data_ptr(), largest.data_ptr(), num_rows, vocab_size, num_threads())
    return largest if token_ids is None else token_ids[largest]


def choose_tokens(scores: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """The token of each row of scores [R, V] float32: [R] int64, -1 where no token can be chosen.

    The same token in every batch and by any number of threads. It is torch's, unless the winner or
    a filter's limit is decided by the last bit of an exponential or a logarithm.

    Raises:
        ValueError: when shapes or data types do not fit, or temperatures are given without seeds
            or positions.
    """
    num_rows, vocab_size = _check(scores)
    token_ids = scores.new_empty(num_rows, dtype=torch.int64)
    addresses = scores.data_ptr(), *_addresses(metadata, num_rows), 0, token_ids.data_ptr(), 0
    _choose(None, *addresses, num_rows, vocab_size, num_threads(), 0, 0, 1.0)
    return token_ids


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
        ValueError: when shapes or data types do not fit, or temperatures are given without seeds
            or positions.
    """
    num_rows, vocab_size = _check(scores)
    if token_ids is not None and (
        token_ids.dtype is not torch.int32
        or token_ids.shape != (vocab_size,)
        or not token_ids.is_contiguous()
    ):
        raise mismatch("choose_drafts", scores=scores, token_ids=token_ids)
    drafts = scores.new_empty(num_rows, dtype=torch.int64)
    confidences = scores.new_empty(num_rows) if confident else None
    addresses = (
        scores.data_ptr(),
        *_addresses(metadata, num_rows),
        0 if token_ids is None else token_ids.data_ptr(),
        drafts.data_ptr(),
        0 if confidences is None else confidences.data_ptr(),
    )
    _choose(None, *addresses, num_rows, vocab_size, num_threads(), 1, ahead, scale)
    return drafts, confidences


def _check(scores: torch.Tensor) -> tuple[int, int]:
    """Their shape."""
    num_rows, vocab_size = scores.shape
    if scores.dtype is not torch.float32 or not scores.is_contiguous() or not vocab_size:
        raise mismatch("choose_tokens", scores=scores)
    return num_rows, vocab_size


def _addresses(m: SamplingMetadata, num_rows: int) -> list[int]:
    if m.temperature is not None and (m.seeds is None or m.positions is None):
        raise ValueError("temperature needs seeds and positions")
    return [
        0 if option is None else _address(option, dtype, num_rows)
        for option, dtype in zip(m.tensors, _OPTION_TYPES, strict=True)
    ]


def _address(option: torch.Tensor, dtype: torch.dtype, num_rows: int) -> int:
    if option.dtype is not dtype or option.shape != (num_rows,) or not option.is_contiguous():
        raise mismatch("choose_tokens", option=option)
    return option.data_ptr()
