"""Requests that end only when they are aborted, however fast the machine is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

POSITIONS = 1 << 17
# Minutes of steps that become slower and slower, as each reads the whole context.
ENDLESS_TOKENS = POSITIONS - 1024
# The keys and values of one such request.
CACHE = "72MiB"
SERVER_FLAGS = ("--kv-cache-memory", CACHE)


def write_endless(tiny: Path, folder: Path) -> Path:
    """A copy of the tiny checkpoint with a context for endless requests -> its folder."""
    shutil.copytree(tiny, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    return folder
