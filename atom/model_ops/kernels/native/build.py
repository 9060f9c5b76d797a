"""Compiles the C++ kernels for this processor and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from atom.environment import cache_dir, cxx_compiler

SOURCE_DIR = Path(__file__).parent / "csrc"
_COMPILERS = ("c++", "g++", "clang++")
# No automatic contraction to FMA: it could round tiles of different sizes differently. The kernels
# use FMA explicitly.
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)
_NATIVE_FLAG = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
_TIMEOUT_SECONDS = 300


class NativeBuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message says why."""


@dataclass(frozen=True)
class NativeBuild:
    """Attributes:
    library: the loaded kernels, or None.
    reason: why there are none.
    """

    library: ctypes.CDLL | None
    reason: str | None


@functools.cache
def native_build() -> NativeBuild:
    """The kernels of this process: compiled at the first start on a machine, then cached."""
    try:
        team = _torch_thread_team()
        library = ctypes.CDLL(str(build(cache_dir() / "native")))
    except (NativeBuildError, OSError) as error:
        return NativeBuild(None, str(error))
    library.atom_use_team(team)
    return NativeBuild(library, None)


def _torch_thread_team() -> ctypes.c_void_p:
    """The fork function of the OpenMP runtime that torch uses.

    A process may contain several OpenMP runtimes; the kernels must use torch's threads.
    """
    import torch

    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_library.GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError) as error:
        raise NativeBuildError(f"torch's OpenMP runtime cannot be shared: {error}") from error


def build(folder: Path) -> Path:
    """Compile into `folder` unless the result is there; returns the path of the shared library.

    Its name is a digest of sources, compiler, flags and processor. Concurrent builds are safe: the
    finished file is moved into place atomically.

    Raises:
        NativeBuildError: when there is no compiler or compiling fails.
    """
    compiler = _find_compiler()
    flags = [*_FLAGS, _native_flag()]
    target = folder / f"{_digest(compiler, flags)}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            os.replace(_compile(compiler, flags, Path(scratch)), target)
    return target


def _find_compiler() -> str:
    wanted = cxx_compiler()
    for name in (wanted,) if wanted else _COMPILERS:
        if path := shutil.which(name):
            return path
    raise NativeBuildError(
        f"no C++ compiler: looked for {wanted or ', '.join(_COMPILERS)}; install one or set CXX"
    )


def _native_flag() -> str:
    machine = platform.machine()
    if machine not in _NATIVE_FLAG:
        raise NativeBuildError(
            f"native kernels are written for {' and '.join(_NATIVE_FLAG)}, not {machine}"
        )
    return _NATIVE_FLAG[machine]


def _digest(compiler: str, flags: list[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCE_DIR.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    version = _run([compiler, "--version"])
    for part in (compiler, version, *flags, _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _processor() -> str:
    """CPU model and features, since machines may share a cache directory."""
    wanted = ("model name", "flags", "CPU part", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, flags: list[str], scratch: Path) -> Path:
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    objects = [scratch / f"{source.stem}.o" for source in sources]
    commands = [
        [compiler, *flags, "-c", str(source), "-o", str(out)]
        for source, out in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(_run, commands))
    library = scratch / "kernels.so"
    _run([compiler, "-shared", *map(str, objects), "-o", str(library)])
    return library


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.CalledProcessError as error:
        first = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[0]
        raise NativeBuildError(f"{command[0]} failed: {first}") from error
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{command[0]} took over {_TIMEOUT_SECONDS} s") from error
    return done.stdout
