"""Draft models that ship with the package. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_ASSETS = Path(__file__).parents[2] / "assets"
_EMBEDDED_MODELS_DRAFT = "smollm2-135m-eagle3"

# Engine options that the shipped draft runs with.
SHIPPED_OPTIONS: dict[str, Any] = {
    "method": "eagle3",
    "num_speculative_tokens": 3,
    "speculative_lookup": True,
    "speculative_adaptive": True,
}


def shipped_draft_for(model: str | None) -> Path | None:
    """The folder of the draft shipped for a model; None without one.

    Args:
        model: as given by the user; None is the embedded model, the only one with a draft.
    """
    folder = _ASSETS / _EMBEDDED_MODELS_DRAFT
    return folder if model is None and (folder / "config.json").is_file() else None
