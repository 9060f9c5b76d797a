"""The folder of aiter's compiled modules, and what is being compiled there.

Where aiter cannot write to its package's folder it copies that to the home folder while it is
imported. Nothing locks the copy: of several ranks most go on with a part of it, and one that is
killed leaves a part for ever. What aiter builds there, it then looks for in the package. So it is
given a folder of its own: links to the package's modules, which stand there all at once, and room
for those that it builds.

As of aiter's main branch of 2026-08-22: `get_user_jit_dir` and `build_module` in
`aiter/jit/core.py`, `compile_lib` in `csrc/cpp_itfs/utils.py`, `aiter/__init__.py` for FlyDSL's
kernels, and `FileBaton`, whose files name who builds.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from atom.environment import (
    aiter_build_dir,
    aiter_jit_dir,
    cache_dir,
    has_flydsl_cache_dir,
    set_variables,
)

_FLYDSL = "flydsl_cache"


def give_folder() -> None:
    """Say where aiter keeps its modules, before it is imported, unless the user says it.

    Several processes may call it at once. A folder belongs to one installation: another aiter, or
    the same one built again, gets another.

    Raises:
        ConfigError, OSError: when there is no folder that can be written to.
    """
    package = _package_folder()
    if aiter_jit_dir() is not None or package is None or os.access(package, os.W_OK):
        return
    # Not above: few starts come here, and it loads asyncio.
    from filelock import FileLock

    files = list(_files(package))
    folder = cache_dir() / "aiter" / _key(package, files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The lock saves work, and cleans up after a start that was killed; the rename is what counts.
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            _link(package, files, folder)
    set_variables({"AITER_JIT_DIR": str(folder)})
    # Kernels that came with aiter; FlyDSL adds those that it compiles.
    if (folder / _FLYDSL).is_dir() and not has_flydsl_cache_dir():
        set_variables({"FLYDSL_RUNTIME_CACHE_DIR": str(folder / _FLYDSL)})


def _package_folder() -> Path | None:
    """aiter's folder of modules; None where there is no aiter. Nothing is imported."""
    spec = find_spec("aiter")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    folders = [Path(place) / "jit" for place in places]
    return next((folder for folder in folders if folder.is_dir()), None)


def _files(package: Path) -> Iterator[Path]:
    """What there is to link: modules and FlyDSL's kernels."""
    yield from sorted(package.glob("*.so"))
    yield from sorted(file for file in (package / _FLYDSL).rglob("*") if file.is_file())


def _key(package: Path, files: Sequence[Path]) -> str:
    """Another one for every build of aiter."""
    told = hashlib.sha256(str(package).encode())
    for file in (package / "core.py", *files):
        stat = file.stat()
        told.update(f"\n{file.relative_to(package)} {stat.st_size} {stat.st_mtime_ns}".encode())
    return told.hexdigest()[:16]


def _link(package: Path, files: Sequence[Path], folder: Path) -> None:
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    (part / "build").mkdir(parents=True)
    for file in files:
        link = part / file.relative_to(package)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    part.rename(folder)


def list_builds() -> list[str]:
    """What aiter is compiling on this machine now: `aiter builds NAME for 40 s`."""
    folder = aiter_jit_dir()
    package = Path(folder) if folder is not None else _package_folder()
    batons = [] if package is None else sorted((package / "build").glob("lock_*"))
    batons += sorted(aiter_build_dir().glob("*/lock"))
    return [said for baton in batons if (said := _describe(baton)) is not None]


def _describe(baton: Path) -> str | None:
    """None when whoever held it is gone."""
    try:
        pid, host, *_ = baton.read_text().split()
        seconds = time.time() - baton.stat().st_mtime
    except (OSError, ValueError):
        return None  # it ended meanwhile, or was killed before it wrote its name
    if host == socket.gethostname() and not Path(f"/proc/{pid}").exists():
        return None
    name = baton.parent.name if baton.name == "lock" else baton.name.removeprefix("lock_")
    return f"aiter builds {name} for {seconds:.0f} s"
