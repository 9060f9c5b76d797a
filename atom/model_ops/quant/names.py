"""Finds what a checkpoint's configuration says of a module, by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from atom.config import ConfigError
from atom.model_ops.quant.base import Header

T = TypeVar("T")

_MAX_ENTRIES = 100_000


def same_for_all(prefix: str, parts: Sequence[str], find: Callable[[str], T]) -> T:
    """What `find` returns for every part of a layer.

    Args:
        prefix: the layer's name; its own entry is used if there are no parts.

    Raises:
        ConfigError: when it differs, since they are computed as one product.
    """
    names = parts or (prefix,)
    found = find(names[0])
    for name in names[1:]:
        if (other := find(name)) != found:
            raise ConfigError(
                f"{names[0]} is stored as {found or 'unquantised'} and {name} as "
                f"{other or 'unquantised'}; they are parts of {prefix} and must be stored alike"
            )
    return found


def find_header(
    headers: Mapping[str, Header], prefix: str, parts: Sequence[str], tensor: str
) -> Header | None:
    """The header of `tensor` of a layer, or of its first part that has one."""
    for name in parts or (prefix,):
        if header := headers.get(f"{name}.{tensor}"):
            return header
    return None


def read_flag(config: Mapping[str, object], key: str, supported: Sequence[T], default: T) -> T:
    """The value of a key.

    Raises:
        ConfigError: when it is not among the supported ones.
    """
    value = config.get(key)
    if value is None:
        return default
    for known in supported:
        if value == known:
            return known
    raise ConfigError(
        f"quantization_config: {key}={value!r} is not supported; supported: "
        f"{', '.join(repr(known) for known in supported)}"
    )


def read_names(key: str, value: object) -> tuple[str, ...]:
    """A list of names or patterns; None is an empty one.

    Raises:
        ConfigError: when it is something else, or too long.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"quantization_config: {key}={value!r} is no list of names")
    _check_size(key, len(value))
    return tuple(value)


def read_object(key: str, value: object) -> Mapping[str, Any]:
    """An object; None is an empty one.

    Raises:
        ConfigError: when it is something else, or too large.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"quantization_config: {key}={value!r} is no object")
    _check_size(key, len(value))
    return value


def _check_size(key: str, size: int) -> None:
    if size > _MAX_ENTRIES:
        raise ConfigError(
            f"quantization_config: {key} has {size} entries; at most {_MAX_ENTRIES} are read"
        )


def modules_above(name: str) -> Iterator[str]:
    """`a`, `a.b` and `a.b.c` for `a.b.c`."""
    pieces = name.split(".")
    return (".".join(pieces[:end]) for end in range(1, len(pieces) + 1))


def spans(name: str) -> Iterator[str]:
    """All consecutive components: `a`, `a.b`, `a.b.c`, `b`, `b.c` and `c` for `a.b.c`."""
    pieces = name.split(".")
    return (
        ".".join(pieces[start:end])
        for start in range(len(pieces))
        for end in range(start + 1, len(pieces) + 1)
    )


def names_module(pattern: str, name: str) -> bool:
    """Whether a pattern of a list of modules stands for `name`.

    It is a module's name or a glob, either of which stands for all modules below it, too; or `re:`
    and a regular expression, which must match from the start of the name.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return any(fnmatchcase(module, pattern) for module in modules_above(name))
