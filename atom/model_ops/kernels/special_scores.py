"""What few attention layers do with their scores: cap them, or add sinks."""

from __future__ import annotations

from atom.model_ops.registry import OpQuery


def refuses_special_scores(query: OpQuery) -> str | None:
    """Why a kernel of plain softmax cannot run a layer; None if it can."""
    wanted = [name for name in ("softcap", "sinks") if query.shape.get(name)]
    return f"computes a plain softmax, without {' and '.join(wanted)}" if wanted else None
