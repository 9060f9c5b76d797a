"""The wheel: it holds what a user needs, runs outside the repository, and replaces no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from atom.version import __version__

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip installs it, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


def pip(*words: str, path: Path | None = None) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    env = os.environ | {"PYTHONPATH": str(path or "")}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def installed(site: Path, *words: str) -> str:
    env = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    ran = subprocess.run(words, cwd=site, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_everything_in_the_package_is_in_the_wheel(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "atom"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = {name for name in listed.stdout.split() if (ROOT / name).exists()} - names
    assert not missing
    assert {name.split("/")[0] for name in names} == {"atom", f"atom_llm-{__version__}.dist-info"}


def test_the_command_answers_outside_the_repository(site: Path) -> None:
    command = str(site / "bin" / "atom")
    assert installed(site, command, "--version") == f"atom {__version__}\n"
    where = "import atom; print(atom.__file__)"
    assert installed(site, sys.executable, "-c", where).startswith(str(site))
    options = ("--set", "temperature=0", "--set", "max_tokens=20")
    said = installed(site, command, "run", "Name three rivers in France.", *options)
    assert "river" in said


def test_a_torch_that_is_there_stays(wheel: Path, tmp_path: Path) -> None:
    version = "2.11.0+rocm7.1"
    known = tmp_path / f"torch-{version}.dist-info"
    known.mkdir()
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    assert f"Version: {version}\n" in pip("show", "torch", path=tmp_path)
    dry = ("install", "--dry-run", "--no-index", "--quiet", "--report", "-", f"{wheel}[server]")
    report = json.loads(pip(*dry, path=tmp_path))
    assert {item["metadata"]["name"] for item in report["install"]} <= {"atom-llm"}
