"""Safe reading of the small files of a model folder."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from atom.config import ConfigError

# Several times the largest published index or tokenizer; parsing takes about twenty times this.
_MOST_JSON_BYTES = 128 << 20
# Published files need about ten; limits the recursion of code that walks the value.
_MOST_LEVELS = 100

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_there(path: Path) -> bool:
    """Whether a path exists, even as a broken link."""
    return path.is_symlink() or path.exists()


def check_regular(path: Path) -> os.stat_result:
    """Check that `path` is a regular file, so that reading it cannot block or never end.

    Raises:
        ConfigError: when, links followed, it is not a regular file or not accessible.
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
        ConfigError: when the file is not regular, larger than 128 MiB, not valid JSON, or nested
            100 levels deep.
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
        ConfigError: as `read_json`, and when the value is not an object.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} should hold a JSON object, got {type(content).__name__}")
    return content
