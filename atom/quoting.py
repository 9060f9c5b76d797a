"""Shortens user input quoted in error messages."""

from __future__ import annotations

MAX_QUOTED = 200


def quote(value: object) -> str:
    """A value as Python writes it, cut to 200 characters."""
    return excerpt(repr(value[: MAX_QUOTED + 1] if isinstance(value, str) else value))


def excerpt(text: str, limit: int = MAX_QUOTED) -> str:
    """A text, cut to `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
