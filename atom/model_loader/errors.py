"""Errors of a checkpoint's content."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_NAMED = 10


class WeightError(ValueError):
    """A checkpoint is damaged or does not fit the model; the message says where."""


def name_some(names: Sequence[str], separator: str = ", ") -> str:
    """The first ten names, and the number of the others."""
    shown = separator.join(names[:_MOST_NAMED])
    hidden = len(names) - _MOST_NAMED
    return f"{shown} and {hidden} more" if hidden > 0 else shown
