"""Where the configuration of a model is."""

from __future__ import annotations

from pathlib import Path


def folder_of(model: str) -> str:
    """The folder of a `config.json`; anything else, such as a hub id, is unchanged."""
    path = Path(model).expanduser()
    return str(path.parent) if path.is_file() and path.name == "config.json" else model
