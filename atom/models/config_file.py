"""Opening the small files that describe a model, whatever they turn out to be."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from atom.config import ConfigError

# Several times the largest published index or tokenizer; parsed, it takes some twenty times that.
_MOST_JSON_BYTES = 128 << 20
# Published files need about ten. Whoever walks through a value may call itself at every level.
_MOST_LEVELS = 100

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_there(path: Path) -> bool:
    """Whether a folder has anything of that name, if only a link that leads nowhere."""
    return path.is_symlink() or path.exists()


def check_regular(path: Path) -> os.stat_result:
    """What the file system says about `path`, which a read can neither block nor run forever on.

    Raises:
        ConfigError: when, links followed, it is no regular file or cannot be looked at.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        where = f" (a link to {path.readlink()})" if path.is_symlink() else ""
        raise ConfigError(f"{path}{where} cannot be opened: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise ConfigError(f"{path} is {kind}; only regular files are read")
    return status


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        ConfigError: naming the file, when it is no regular file, is larger than 128 MiB, or
            holds no JSON or brackets 100 deep.
    """
    size = check_regular(path).st_size
    if size > _MOST_JSON_BYTES:
        raise ConfigError(f"{path} has {size} bytes; at most {_MOST_JSON_BYTES} are read as JSON")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise _too_deep(path) from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    level = [content]
    for _ in range(_MOST_LEVELS):
        level = [inner for value in level for inner in _containers_in(value)]
        if not level:
            return content
    raise _too_deep(path)


def _containers_in(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in inner if isinstance(item, (dict, list))]


def _too_deep(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read as JSON: its brackets nest deeper than {_MOST_LEVELS} levels"
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: as `read_json`, and when the file holds something else.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} should hold a JSON object, got {type(content).__name__}")
    return content
