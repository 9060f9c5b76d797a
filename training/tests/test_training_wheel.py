"""The wheel of atom-train: its own package, and the engine as what it needs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import atom_train

ROOT = Path(__file__).parents[1]


def test_the_wheel_has_the_package_alone(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    info = f"atom_train-{atom_train.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(info)}
        metadata = archive.read(f"{info}/METADATA").decode()
    package = {path.relative_to(ROOT) for path in (ROOT / "atom_train").rglob("*.py")}
    assert {Path(name) for name in names} == package
    assert "Requires-Dist: atom-llm\n" in metadata
