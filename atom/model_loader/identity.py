"""What tells one checkpoint from another, without reading its weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from atom.model_loader.safetensors.reader import LENGTH_BYTES, MOST_HEADER_BYTES
from atom.models.config.file import read_json_object

_LONGEST_SHOWN = 80


def checkpoint_identity(folder: Path) -> dict[str, str]:
    """The fields of config.json, and size and header digest of every safetensors file, by name.

    Raises:
        ConfigError: when config.json cannot be read.
    """
    config = read_json_object(folder / "config.json")
    identity = {f"{key} of config.json": _shown(value) for key, value in config.items()}
    for path in sorted(folder.glob("*.safetensors")):
        identity[path.name] = f"{path.stat().st_size} bytes, header {_header_digest(path)}"
    return identity


def _shown(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _LONGEST_SHOWN else f"another (digest {_digest(text.encode())})"


def _header_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        return _digest(file.read(min(length, MOST_HEADER_BYTES)))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
