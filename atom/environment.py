"""The environment variables that the package reads, and no other file reads."""

from __future__ import annotations

import os
from pathlib import Path

from atom.config import ConfigError, parse_bytes

DEFAULT_CACHE_LIMIT = "50GiB"


def cache_dir() -> Path:
    """Where converted checkpoints are kept: `$ATOM_CACHE`, else the user's cache folder."""
    if configured := os.environ.get("ATOM_CACHE"):
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "atom"


def cache_limit() -> int:
    """`$ATOM_CACHE_LIMIT`, such as 20GiB: bytes that converted checkpoints may take.

    Raises:
        ConfigError: when it is no size.
    """
    given = os.environ.get("ATOM_CACHE_LIMIT")
    try:
        return parse_bytes(given or DEFAULT_CACHE_LIMIT)
    except ConfigError as error:
        raise ConfigError(f"$ATOM_CACHE_LIMIT: {error}") from error


def api_key_from_environment() -> str | None:
    """`$ATOM_API_KEY`: the server's key when `--api-key` is not given."""
    return os.environ.get("ATOM_API_KEY") or None


def cxx_compiler() -> str | None:
    """`$CXX`: the C++ compiler of the CPU kernels, when the usual names do not find it."""
    return os.environ.get("CXX") or None


def triton_is_interpreted() -> bool:
    """`$TRITON_INTERPRET`, Triton's own variable, which it reads when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def op_override(op: str) -> str | None:
    """`$ATOM_OP_<NAME>`: the implementation that the user wants for one op."""
    return os.environ.get(f"ATOM_OP_{op.upper()}") or None
