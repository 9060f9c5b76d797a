"""aiter's modules where its package cannot be written to: all of them, on every rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from atom.model_ops.kernels import aiter_modules, probe

ROOT = Path(__file__).parents[3]
NUM_MODULES = 24
# aiter chooses its folder while it is imported: as the variable says, else its own if that can be
# written to, else a copy that nothing locks. Says then what it finds there.
CORE = """
import os, shutil, time
here = os.path.dirname(os.path.abspath(__file__))

def slowly(source, target):
    time.sleep(0.01)
    return shutil.copy2(source, target)

if "AITER_JIT_DIR" in os.environ:
    folder = os.environ["AITER_JIT_DIR"]
elif os.access(here, os.W_OK):
    folder = here
else:
    folder = os.path.expanduser("~/.aiter/jit")
    if not os.path.exists(folder):
        shutil.copytree(here, folder, copy_function=slowly)
seen = [n for n in os.listdir(folder) if n.endswith(".so") and os.path.getsize(folder + "/" + n)]
"""
# A rank: nobody may write to the package, which root could.
RANK = """
import os, sys
os.access = lambda *_: False
from atom.model_ops.kernels.aiter_modules import give_folder
{before}
give_folder()
import aiter.jit.core
print(len(aiter.jit.core.seen))
"""
KILLED = """
from pathlib import Path
links = []
def link(path, target):
    links.append(path)
    os.symlink(target, path)
    if len(links) == 3:
        os._exit(9)
Path.symlink_to = link
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """aiter's folder of modules, as installed."""
    jit = tmp_path / "site" / "aiter" / "jit"
    (jit / "flydsl_cache" / "gemm").mkdir(parents=True)
    (jit.parent / "__init__.py").write_text("import aiter.jit.core")
    (jit / "__init__.py").touch()
    (jit / "core.py").write_text(CORE)
    for number in range(NUM_MODULES):
        (jit / f"module_{number}.so").write_text(f"module {number}")
    (jit / "flydsl_cache" / "gemm" / "kernel").write_text("kernel")
    return jit


@pytest.fixture
def variables(package: Path, tmp_path: Path) -> dict[str, str]:
    """Of a rank's process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AITER")}
    path = os.pathsep.join((str(package.parents[1]), str(ROOT)))
    own = {"HOME": str(tmp_path / "home"), "ATOM_CACHE": str(tmp_path / "cache")}
    return {**kept, **own, "PYTHONPATH": path}


def start(variables: Mapping[str, str], before: str = "") -> subprocess.Popen[str]:
    program = RANK.format(before=before)
    return subprocess.Popen(
        [sys.executable, "-c", program], env=variables, stdout=subprocess.PIPE, text=True
    )


def test_eight_ranks_at_once_see_all_modules(variables: dict[str, str]) -> None:
    ranks = [start(variables) for _ in range(8)]
    assert [rank.communicate()[0].strip() for rank in ranks] == [str(NUM_MODULES)] * 8
    assert not Path(variables["HOME"]).exists()


def test_a_start_that_was_killed_leaves_no_part(variables: dict[str, str], tmp_path: Path) -> None:
    """Neither its own, nor one that aiter had begun to copy."""
    old = Path(variables["HOME"]) / ".aiter" / "jit"
    old.mkdir(parents=True)
    (old / "module_0.so").touch()
    assert start(variables, KILLED).wait() == 9
    assert len(list((tmp_path / "cache" / "aiter").glob("*.part/*.so"))) == 3
    assert start(variables).communicate()[0].strip() == str(NUM_MODULES)
    names = {path.suffix for path in (tmp_path / "cache" / "aiter").iterdir()}
    assert names <= {"", ".lock"}


@pytest.fixture
def here(
    package: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """This process has the package, and may not write to it."""
    monkeypatch.syspath_prepend(str(package.parents[1]))
    monkeypatch.setenv("ATOM_CACHE", variables["ATOM_CACHE"])
    for name in ("AITER_JIT_DIR", "FLYDSL_RUNTIME_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "access", lambda *_: False)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


@pytest.mark.usefixtures("here")
def test_the_folder_is_given_before_aiter_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    probe._installed.cache_clear()
    probe._give_aiter_its_folder.cache_clear()
    try:
        assert probe.version() is None
        assert len(sys.modules["aiter.jit.core"].seen) == NUM_MODULES
        assert sys.modules["aiter.jit.core"].folder == os.environ["AITER_JIT_DIR"]
    finally:
        probe._installed.cache_clear()
        probe._give_aiter_its_folder.cache_clear()


def test_what_is_built_there_stays_there(here: Path) -> None:
    """And the package as it is: a module that is built again takes the place of its link."""
    aiter_modules.give_folder()
    folder = Path(os.environ["AITER_JIT_DIR"])
    assert folder.is_relative_to(os.environ["ATOM_CACHE"])
    kernels = Path(os.environ["FLYDSL_RUNTIME_CACHE_DIR"])
    assert (kernels / "gemm" / "kernel").read_text() == "kernel"
    (kernels / "gemm" / "another").write_text("another")
    (folder / "module_0.so").unlink()
    (folder / "module_0.so").write_text("built again")
    aiter_modules.give_folder()
    assert (folder / "module_0.so").read_text() == "built again"
    assert (here / "module_0.so").read_text() == "module 0"
    assert not (here / "flydsl_cache" / "gemm" / "another").exists()


def test_another_build_of_aiter_gets_another_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aiter_modules.give_folder()
    first = os.environ["AITER_JIT_DIR"]
    monkeypatch.delenv("AITER_JIT_DIR")
    (here / "module_3.so").write_text("module 3, corrected")
    aiter_modules.give_folder()
    assert os.environ["AITER_JIT_DIR"] != first
    assert (Path(os.environ["AITER_JIT_DIR"]) / "module_3.so").read_text() == "module 3, corrected"


@pytest.mark.usefixtures("here")
def test_the_users_folder_and_a_package_that_can_be_written_to_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: True)
    aiter_modules.give_folder()
    assert "AITER_JIT_DIR" not in os.environ
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("AITER_JIT_DIR", "mine")
    aiter_modules.give_folder()
    assert os.environ["AITER_JIT_DIR"] == "mine"
    assert "FLYDSL_RUNTIME_CACHE_DIR" not in os.environ
    assert not Path(os.environ["ATOM_CACHE"]).exists()


def test_what_is_being_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a process still builds; of other machines nobody can tell."""
    monkeypatch.setenv("AITER_JIT_DIR", str(tmp_path))
    monkeypatch.setenv("AITER_ROOT_DIR", str(tmp_path / "root"))
    assert aiter_modules.list_builds() == []
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = socket.gethostname()
    batons = {
        "build/lock_module_moe": f"{os.getpid()}\n{host}\n",
        "build/lock_module_gone": f"{ended.pid}\n{host}\n",
        "build/lock_module_killed": "",
        "build/lock_module_there": f"{ended.pid}\nanother-{host}\n",
        "root/build/pa_reduce_64/lock": f"{os.getpid()}\n{host}\n",
    }
    for name, contents in batons.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(contents)
    said = [line.partition(" for ")[0] for line in aiter_modules.list_builds()]
    assert said == [
        f"aiter builds {name}" for name in ("module_moe", "module_there", "pa_reduce_64")
    ]
