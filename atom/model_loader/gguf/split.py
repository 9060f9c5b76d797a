"""Which GGUF files are one model."""

from __future__ import annotations

import re
from pathlib import Path

from atom.config import ConfigError

_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


def split_paths(path: Path) -> tuple[Path, ...]:
    """The files of a split model, by the name of any of them; of others the file itself."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return (path,)
    return tuple(
        path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf")
        for number in range(1, int(match["count"]) + 1)
    )


def only_file(folder: Path) -> Path | None:
    """The GGUF file in a folder, or the first of a split model; None without any.

    Raises:
        ConfigError: when there are several models.
    """
    found = sorted(folder.glob("*.gguf"))
    if found and not set(found) <= set(split_paths(found[0])):
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"{folder} holds several GGUF files; name one of {names}")
    return found[0] if found else None
