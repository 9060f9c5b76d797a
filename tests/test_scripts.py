"""What the scripts say: a line a step, and all of the installer's words when it fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ENV = Path(__file__).parents[1] / "scripts" / "lib" / "env.sh"


@pytest.mark.parametrize("status", [0, 1])
def test_the_installer_is_heard_only_when_it_fails(tmp_path: Path, status: int) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f"#!/bin/sh\nfor i in 1 2 3; do echo line $i; done; echo why >&2; exit {status}"
    )
    python.chmod(0o755)
    ran = subprocess.run(
        ["bash", "-euc", f". '{ENV}'; _pip something; echo done"],
        env={"PATH": "/usr/bin:/bin", "ATOM_VENV": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == status
    if status == 0:
        assert (ran.stdout, ran.stderr) == ("done\n", "")
    else:
        assert ran.stdout == ""
        assert ran.stderr.splitlines()[:4] == ["line 1", "line 2", "line 3", "why"]
        assert "pip install something failed" in ran.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def say(script: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `script` after env.sh; `_pip` says what it would install."""
    return subprocess.run(
        ["bash", "-euc", f". '{ENV}'; _pip() {{ echo pip \"$@\"; }}; {script}"],
        env={"PATH": "/usr/bin:/bin", "ATOM_VENV": str(tmp_path / "venv"), **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("system", "has_nvidia", "reaches", "installs"),
    [
        ("Linux", False, True, "pip --extra-index-url https://download.pytorch.org/whl/cpu torch="),
        ("Linux", False, False, "pip torch=="),
        ("Linux", True, True, "pip torch=="),
        ("Darwin", False, True, "pip torch=="),
    ],
)
def test_without_an_nvidia_gpu_torch_is_the_cpu_build_where_it_can_be_had(
    tmp_path: Path, system: str, has_nvidia: bool, reaches: bool, installs: str
) -> None:
    ran = say(
        f"uname() {{ echo {system}; }}; _has_nvidia() {{ {str(has_nvidia).lower()}; }}; "
        f"_can_reach() {{ {str(reaches).lower()}; }}; _install_torch",
        tmp_path,
    )
    assert ran.stdout.startswith(installs), ran
    assert ran.stdout.endswith("+cpu\n") == ("cpu" in installs)


def test_an_index_that_cannot_be_reached_is_given_up_without_a_word(tmp_path: Path) -> None:
    ran = say(
        f"ATOM_PYTHON={sys.executable}; _can_reach http://127.0.0.1:9/ || echo no; "
        f"_can_reach file://{ENV} && echo yes",
        tmp_path,
    )
    assert (ran.stdout, ran.stderr) == ("no\nyes\n", "")


def test_an_amd_gpu_without_its_torch_is_told_before_anything_is_made(tmp_path: Path) -> None:
    pretend = "_torch_to_keep() { :; }; _has_amd() { true; }; ensure_env server"
    ran = say(pretend, tmp_path, PYTHON=sys.executable)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert "get-started" in ran.stderr
    assert "ATOM_CPU_ONLY=1" in ran.stderr
    assert not (tmp_path / "venv").exists()


def test_a_cpu_only_environment_asks_for_no_gpu(tmp_path: Path) -> None:
    ran = say("_has_amd || _has_nvidia || echo cpu", tmp_path, ATOM_CPU_ONLY="1")
    assert ran.stdout == "cpu\n"


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("named", [True, False])
def test_gpu_check_uses_what_is_there(tmp_path: Path, status: int, named: bool) -> None:
    """Nothing is installed into an interpreter that has torch; python3 must have everything."""
    python = tmp_path / "python3"
    python.write_text(
        f'#!/bin/sh\ncase "$1" in *_gpu_needs.py) exit {status};; '
        '*gpu_check.py) echo ran "$@" in "$PYTHONPATH";; *) echo made >&2; exit 9;; esac\n'
    )
    python.chmod(0o755)
    script = ENV.parents[1] / "gpu-check"
    for tool in ("bash", "dirname"):  # and no other Python
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    env = {"PATH": str(tmp_path), "ATOM_VENV": str(tmp_path / "venv")}
    ran = subprocess.run(
        [str(tmp_path / "bash"), str(script), "--parts", "kernels"],
        env=env | ({"PYTHON": str(python)} if named else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if named or status == 0:
        root = ENV.parents[2]
        assert ran.stdout == f"ran benchmarks/gpu_check.py --parts kernels in {root}\n"
    else:
        assert ran.returncode == 1
        assert ran.stdout == ""
        assert "no Python 3.10 to 3.14 found" in ran.stderr
