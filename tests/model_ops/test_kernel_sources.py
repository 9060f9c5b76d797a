"""Which processors the C++ kernels are compiled for, and that their sources are right for them."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from atom.environment import cxx_compiler
from atom.model_ops.kernels.native import build as build_module
from atom.model_ops.kernels.native.build import SOURCE_DIR, NativeBuildError, build, native_build

# What nearly all sources begin with, and what takes nearly all the time to parse.
COMMON = "parallel.h", "simd.h"


def assert_sources_parse(compiler: str, arch: str, folder: Path) -> None:
    """With that value of -march: parsed, not compiled; the common headers once, into `folder`."""
    path = shutil.which(compiler)
    if path is None:
        pytest.skip(f"there is no {compiler}")
    common = folder / "common.h"
    common.write_text("".join(f'#include "{name}"\n' for name in COMMON))
    sources = sorted(map(str, SOURCE_DIR.rglob("*.cpp")))
    command = [path, "-std=c++17", f"-march={arch}", f"-I{SOURCE_DIR}"]
    for step in (
        ["-x", "c++-header", str(common), "-o", f"{common}.gch"],
        ["-fsyntax-only", "-include", str(common), *sources],
    ):
        done = subprocess.run([*command, *step], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86-64")
@pytest.mark.parametrize("arch", ["haswell", pytest.param("cascadelake", marks=pytest.mark.slow)])
def test_sources_are_right_for_older_processors(arch: str, tmp_path: Path) -> None:
    """AVX2 alone, and AVX-512 without products of bfloat16."""
    assert_sources_parse("c++", arch, tmp_path)


@pytest.mark.parametrize(
    "arch", [pytest.param("armv8-a", marks=pytest.mark.slow), "armv8.2-a+dotprod"]
)
def test_sources_are_right_for_arm(arch: str, tmp_path: Path) -> None:
    """Without and with products of bytes."""
    assert_sources_parse("aarch64-linux-gnu-g++", arch, tmp_path)


@pytest.mark.parametrize(
    ("machine", "flag"),
    [("x86_64", "-march=native"), ("aarch64", "-mcpu=native"), ("arm64", "-mcpu=native")],
)
def test_machines_that_kernels_are_compiled_for(
    machine: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux and macOS name the same processors differently."""
    monkeypatch.delenv("ATOM_CPU_ARCH", raising=False)
    compiled: list[list[str]] = []
    monkeypatch.setattr(build_module._Compilers, "run", lambda _, command: compiled.append(command))
    monkeypatch.setattr(build_module.os, "replace", lambda *_: None)
    monkeypatch.setattr(build_module.platform, "machine", lambda: machine)
    build(tmp_path)
    *objects, linked = compiled
    assert len(objects) == len(list(SOURCE_DIR.rglob("*.cpp")))
    assert all(flag in command for command in objects)
    assert "-shared" in linked


def test_a_machine_that_no_kernels_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module.platform, "machine", lambda: "riscv64")
    with pytest.raises(NativeBuildError, match="x86_64, aarch64, arm64, not riscv64"):
        build(tmp_path)


def test_they_compile_where_there_is_a_compiler() -> None:
    """Else their tests would only be skipped."""
    if not any(map(shutil.which, filter(None, (cxx_compiler(), "g++", "clang++")))):
        pytest.skip("no C++ compiler")
    assert native_build().reason is None
