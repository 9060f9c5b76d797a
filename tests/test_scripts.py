"""What the scripts say: a line a step, and all of the installer's words when it fails."""

from __future__ import annotations

import subprocess
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
