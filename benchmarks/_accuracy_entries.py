"""The entries of recipes/accuracy.toml, and what a machine needs to run them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class EntryError(ValueError):
    """The file of entries is wrong; the message names the entry."""


@dataclass(frozen=True)
class Entry:
    """A model, how it is served, a task, and the least that has to come out.

    Attributes:
        model: folder, .gguf file or hub id; the embedded model when empty.
        flags: of the server, besides the model.
        task: of lm_eval.
        limit: questions; 0 is all of them.
        gen_kwargs: lm_eval's, such as `do_sample=true,temperature=0.7`; the task's when empty.
        concurrency: requests in flight.
        metric: of the task, for the gate.
        min_accuracy: the accuracy gate.
        min_acceptance: the gate of accepted over proposed drafts; 0 has none.
        same_as: an entry before this one with which accuracies and outputs must be identical.
        rocm_gpus: AMD GPUs that it takes.
        start_minutes: until the server has to be ready.
        note: for the report.
    """

    name: str
    task: str
    min_accuracy: float
    model: str = ""
    flags: tuple[str, ...] = ()
    num_fewshot: int = 5
    limit: int = 0
    gen_kwargs: str = ""
    concurrency: int = 8
    metric: str = "exact_match,flexible-extract"
    min_acceptance: float = 0.0
    same_as: str = ""
    rocm_gpus: int = 0
    start_minutes: float = 10.0
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("min_accuracy", "min_acceptance"):
            if not 0 <= getattr(self, name) <= 1:
                raise EntryError(f"[{self.name}] {name} must be in [0, 1]")
        for name in ("num_fewshot", "limit", "rocm_gpus"):
            if getattr(self, name) < 0:
                raise EntryError(f"[{self.name}] {name} must not be negative")
        if self.concurrency < 1 or self.start_minutes <= 0:
            raise EntryError(f"[{self.name}] concurrency and start_minutes must be positive")

    @property
    def server_flags(self) -> list[str]:
        return [*(["--model", self.model] if self.model else []), *self.flags]


_KINDS: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "tuple[str, ...]": list,
}


def read_entries(path: Path) -> dict[str, Entry]:
    """The entries by name, in the file's order.

    Raises:
        EntryError: naming what is unknown, missing or of the wrong type.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EntryError(f"cannot read {path}: {error}") from error
    entries: dict[str, Entry] = {}
    for name, table in tables.items():
        entry = _entry(name, table)
        if entry.same_as and entry.same_as not in entries:
            raise EntryError(f"[{name}] same_as: no entry {entry.same_as!r} comes before it")
        entries[name] = entry
    if not entries:
        raise EntryError(f"{path} holds no entry")
    return entries


def _entry(name: str, table: Any) -> Entry:
    if not isinstance(table, Mapping):
        raise EntryError(f"{name} is no table; entries are written as [{name}]")
    known = {f.name: f for f in fields(Entry) if f.name != "name"}
    if unknown := sorted(set(table) - set(known)):
        raise EntryError(f"[{name}] unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    missing = [n for n, f in known.items() if f.default is MISSING and n not in table]
    if missing:
        raise EntryError(f"[{name}] lacks {', '.join(missing)}")
    for key, value in table.items():
        kind = _KINDS[str(known[key].type)]
        wrong = not isinstance(value, kind) or isinstance(value, bool)
        if wrong or (isinstance(value, list) and not all(isinstance(v, str) for v in value)):
            raise EntryError(f"[{name}] {key} must be of type {known[key].type}, got {value!r}")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    return Entry(name=name, **values)


def why_not_here(entry: Entry) -> str | None:
    """What this machine lacks; None when nothing is known to be lacking."""
    if not entry.rocm_gpus:
        return None
    import torch

    found = torch.cuda.device_count() if torch.version.hip else 0
    if found >= entry.rocm_gpus:
        return None
    return f"it takes {entry.rocm_gpus} ROCm GPUs, and this machine has {found or 'none'}"
