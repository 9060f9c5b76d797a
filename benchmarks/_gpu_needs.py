"""What each part of gpu_check.py imports, and what of that is not installed.

Imports nothing but Python's own: it is asked before anything is known to be there. As a program it
ends with exit status 0 when all parts can run, 3 when some can, 4 when there is no torch, 5 when it
is too old.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

# By module. Everything else comes with these.
_ENGINE = ("torch", "transformers", "msgspec")
NEEDS: dict[str, tuple[str, ...]] = {
    "warm": ("torch",),
    "graphs": (*_ENGINE, "pytest"),
    "kernel-tests": ("torch", "pytest"),
    "kernels": ("torch",),
    "other-kernels": ("torch",),
    "steps": _ENGINE,
    "kimi": _ENGINE,
    "start": _ENGINE,
    "ranks": (*_ENGINE, "psutil"),
}
# Without these less is checked, or found out.
_USEFUL = {
    "triton": "Triton kernels are not checked",
    "hypothesis": "files of tests that need it are left out",
    "pytest_timeout": "a test that hangs takes the time of its part",
}
# Of the server and its processes, structured output, GGUF files.
_NOT_NEEDED = ("fastapi", "zmq", "xgrammar", "tvm_ffi", "gguf")
_PACKAGES = {"zmq": "pyzmq", "tvm_ffi": "apache-tvm-ffi", "pytest_timeout": "pytest-timeout"}
SOME, NO_TORCH, OLD_TORCH = 3, 4, 5
# As in pyproject.toml: products of 16-bit numbers with float32 results, and much besides.
LEAST_TORCH = (2, 11)


def is_installed(module: str) -> bool:
    return find_spec(module) is not None


def torch_version() -> str | None:
    """As it is installed; None if nothing says so."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def why_torch_is_too_old(given: str | None) -> str | None:
    """Why this torch cannot be checked; None if it can."""
    numbers = [part for part in (given or "").split(".")[:2] if part.isdigit()]
    if len(numbers) < 2 or tuple(map(int, numbers)) >= LEAST_TORCH:
        return None
    least = ".".join(map(str, LEAST_TORCH))
    return (
        f"torch {given} is too old: ATOM needs {least} or newer; install a newer one for this "
        f"device (https://pytorch.org/get-started), or name an interpreter that has it (PYTHON=...)"
    )


def missing_of(part: str, installed: Callable[[str], bool] = is_installed) -> list[str]:
    """The packages that a part lacks."""
    return [package(module) for module in NEEDS[part] if not installed(module)]


def package(module: str) -> str:
    """Its name for pip."""
    return _PACKAGES.get(module, module)


def describe(
    parts: Sequence[str],
    installed: Callable[[str], bool] = is_installed,
    torch: Callable[[], str | None] = torch_version,
) -> tuple[list[str], int]:
    """Lines on what is missing, none if nothing is; and the exit status of this program.

    Args:
        torch: its version.
    """
    lacking = {part: missing for part in parts if (missing := missing_of(part, installed))}
    lines = [f"{part} cannot run: it needs {', '.join(m)}" for part, m in lacking.items()]
    for module, what in _USEFUL.items():
        if not installed(module):
            lines.append(f"{package(module)} is missing: {what}")
    unneeded = [package(module) for module in _NOT_NEEDED if not installed(module)]
    if unneeded:
        lines.append(f"missing, and not needed here: {', '.join(unneeded)}")
    wanted = sorted({name for missing in lacking.values() for name in missing})
    if wanted:
        lines.append(f"to run all parts: {sys.executable} -m pip install {' '.join(wanted)}")
    if not installed("torch"):
        return lines, NO_TORCH
    if (why := why_torch_is_too_old(torch())) is not None:
        return [why], OLD_TORCH
    return lines, SOME if lacking else 0


if __name__ == "__main__":
    found, status = describe(list(NEEDS))
    print("\n".join(found), file=sys.stderr)
    sys.exit(status)
