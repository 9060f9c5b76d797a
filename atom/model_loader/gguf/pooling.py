"""GGUF files of models that embed texts: what says so, and the files that say it to others.

Imports no torch, so that a server knows what a model does before the seconds that takes. Source of
the values: `gguf.constants.PoolingType`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from atom.config import ConfigError
from atom.model_loader.gguf.split import only_file
from atom.models.config.file import check_regular

NONE, MEAN, FIRST, LAST, RANK = range(5)
# sentence-transformers' names of what is done here.
_MODES = {MEAN: "mean", FIRST: "cls", LAST: "lasttoken"}
_PACKAGE = "sentence_transformers.models."
# Key-value pairs of the model come before its vocabulary.
_BYTES_READ = 1 << 20
# The end of a key, with its type and value behind it, and the whole of it, behind its length.
_END = re.compile(rb"\.pooling_type(.{4})(.{4})", re.DOTALL)
_KEY = re.compile(rb"[a-z0-9_.-]{1,64}\.pooling_type")
_MOST_KEY_BYTES = 64 + len(".pooling_type")
_UINT32, _INT32 = 4, 5


def stated_pooling(path: Path) -> int:
    """The `pooling_type` of a file's metadata; `NONE` without one."""
    check_regular(path)
    with path.open("rb") as handle:
        head = handle.read(_BYTES_READ)
    for match in _END.finditer(head):
        kind, value = (int.from_bytes(part, "little") for part in match.groups())
        if kind in (_UINT32, _INT32) and _is_key(head[: match.start(1)]):
            return value
    return NONE


def _is_key(head: bytes) -> bool:
    """Whether a key that says its length ends here."""
    ends = head[-_MOST_KEY_BYTES - 8 :]
    return any(
        ends[at : at + 8] == (len(ends) - at - 8).to_bytes(8, "little")
        and _KEY.fullmatch(ends, at + 8)
        for at in range(len(ends) - 8)
    )


def pooled_file(location: Path) -> Path | None:
    """The file at a place, alone or in a folder, of a model that embeds.

    Raises:
        ConfigError: for one that scores pairs, or pools in another way than is known, and for
            several.
    """
    path = only_file(location) if location.is_dir() else location
    if path is None:
        return None
    pooling = stated_pooling(path)
    check_pooling(path, pooling)
    return None if pooling == NONE else path


def check_pooling(path: Path, pooling: int) -> None:
    """Raises:
    ConfigError: as `pooled_file`.
    """
    if pooling not in (NONE, *_MODES):
        what = "scores pairs" if pooling == RANK else "is not known"
        raise ConfigError(
            f"{path}: pooling_type={pooling}, which {what}, is not read from GGUF files; mean (1), "
            f"cls (2) and last (3) are. Models that score are read from safetensors"
        )


def write_modules(pooling: int, folder: Path) -> None:
    """Write the chain of modules, as sentence-transformers does: hidden states are pooled, and
    vectors have length 1, as llama.cpp's server answers.
    """
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    chain = [
        {"idx": i, "name": str(i), "path": path, "type": f"{_PACKAGE}{kind}"}
        for i, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(chain, indent=2))
    options = folder / kinds["Pooling"] / "config.json"
    options.parent.mkdir()
    options.write_text(json.dumps({"pooling_mode": _MODES[pooling]}))
