"""Compiles the C++ kernels for this processor and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from atom.environment import cache_dir, cpu_arch, cxx_compiler
from atom.processors import default_num_threads

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
# Sources name headers by their path from here.
_INCLUDES = f"-I{SOURCE_DIR}"
_COMPILERS = ("c++", "g++", "clang++")
# No automatic contraction to FMA: it could round tiles of different sizes differently. The kernels
# use FMA explicitly.
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)
# By `platform.machine()`: macOS says arm64.
_PROCESSOR_FLAG = {"x86_64": "-march", "aarch64": "-mcpu", "arm64": "-mcpu"}
# Of a file; a busy machine takes minutes, and without kernels every answer takes longer.
_TIMEOUT_SECONDS = 1800
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


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


_building = threading.Lock()


def native_build() -> NativeBuild:
    """The kernels of this process: compiled at the first start on a machine, then cached."""
    with _building:  # threads that ask at once wait for one
        return _native_build()


def is_compiled() -> bool:
    """Whether the kernels can be loaded at once."""
    try:
        return _plan(cache_dir() / "native").target.exists()
    except (NativeBuildError, OSError):
        return False


@functools.cache
def _native_build() -> NativeBuild:
    try:
        return NativeBuild(ctypes.CDLL(str(build(cache_dir() / "native"))), None)
    except (NativeBuildError, OSError) as error:
        return NativeBuild(None, str(error))


def build(folder: Path) -> Path:
    """Compile into `folder` unless the result is there; returns the path of the shared library.

    File names are digests of sources, compiler, flags and processor, and each source has an object
    file of its own, so a change recompiles what it touches. Concurrent builds are safe: finished
    files are moved into place atomically.

    Raises:
        NativeBuildError: when there is no compiler or compiling fails.
    """
    compiler, flags, objects, target = _plan(folder)
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    compilers = _Compilers()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:

        def compile_one(source: Path, target: Path) -> None:
            if not target.exists():
                result = Path(scratch) / target.name
                compilers.run([compiler, *flags, _INCLUDES, "-c", str(source), "-o", str(result)])
                os.replace(result, target)

        with ThreadPoolExecutor(default_num_threads()) as pool:
            done = pool.map(compile_one, objects.keys(), objects.values())
            what = "Compiling kernels for this processor, once"
            logger.info("%s", what)
            try:
                for _ in tqdm(done, desc=what, total=len(objects), unit="file", disable=None):
                    pass
            except BaseException:  # Ctrl-C reaches this process's own group alone
                pool.shutdown(wait=False, cancel_futures=True)
                compilers.stop()
                raise
        library = Path(scratch) / target.name
        link = [compiler, "-shared", "-pthread", *map(str, objects.values()), "-o", str(library)]
        compilers.run(link)
        os.replace(library, target)
    return target


class _Plan(NamedTuple):
    """How kernels are compiled: sources with their object files, and the library of all."""

    compiler: str
    flags: list[str]
    objects: dict[Path, Path]
    target: Path


@functools.cache
def _plan(folder: Path) -> _Plan:
    compiler = _find_compiler()
    flags = [*_FLAGS, _processor_flag()]
    identity = [compiler, _identity(Path(compiler)), *flags, _processor()]
    objects = {
        source: folder / f"{_digest([*identity, *_content(source)])}.o"
        for source in sorted(SOURCE_DIR.rglob("*.cpp"))
    }
    target = folder / f"{_digest(path.name for path in objects.values())}.so"
    return _Plan(compiler, flags, objects, target)


def _find_compiler() -> str:
    wanted = cxx_compiler()
    for name in (wanted,) if wanted else _COMPILERS:
        if path := shutil.which(name):
            return path
    looked = f"{wanted}, as $CXX says" if wanted else ", ".join(_COMPILERS)
    raise NativeBuildError(
        f"no C++ compiler: looked for {looked}; install g++ or clang++, or set CXX to a compiler"
    )


def _processor_flag() -> str:
    machine = platform.machine()
    if machine not in _PROCESSOR_FLAG:
        raise NativeBuildError(
            f"native kernels are written for {', '.join(_PROCESSOR_FLAG)}, not {machine}"
        )
    return f"{_PROCESSOR_FLAG[machine]}={cpu_arch()}"


def _identity(compiler: Path) -> str:
    """Changes when the compiler does; quicker than to ask for its version."""
    stat = compiler.resolve().stat()
    return f"{compiler.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def _content(source: Path) -> list[str]:
    """The texts of a source and of all our headers that it includes."""
    texts: dict[str, str] = {}
    waiting = [source.relative_to(SOURCE_DIR).as_posix()]
    while waiting:
        name = waiting.pop()
        if name not in texts:
            texts[name] = (SOURCE_DIR / name).read_text()
            waiting += _INCLUDE.findall(texts[name])
    return [part for name in sorted(texts) for part in (name, texts[name])]


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _processor() -> str:
    """CPU model and features, since machines may share a cache directory."""
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wanted = ("model name", "flags", "CPU part", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


class _Compilers:
    """Runs compilers, each of which leads a process group of its own.

    A compiler starts programs that do the work and would outlive it, so the group ends as a whole.
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopped = False

    def run(self, command: list[str]) -> None:
        """Raises:
        NativeBuildError: when it fails, takes too long, or is stopped.
        """
        with subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            self._running.add(process)
            try:
                if self._is_stopped:
                    _kill(process)
                _, said = process.communicate(timeout=_TIMEOUT_SECONDS)
            except BaseException as error:
                _kill(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise NativeBuildError(
                    f"{command[0]} took over {_TIMEOUT_SECONDS} s; the next start goes on from "
                    f"there"
                ) from error
            finally:
                self._running.discard(process)
        if process.returncode:
            first = (said.strip().splitlines() or [f"exit status {process.returncode}"])[0]
            raise NativeBuildError(f"{command[0]} failed: {first}")

    def stop(self) -> None:
        """End those that run, and those that are being started."""
        self._is_stopped = True
        for process in list(self._running):
            _kill(process)


def _kill(leader: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
