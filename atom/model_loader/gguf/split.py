"""Names of models that are split into several GGUF files."""

from __future__ import annotations

import re
from pathlib import Path

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
