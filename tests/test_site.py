"""The site is built with every link right, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from atom.command_line.foreign_flags import BY_NAME
from atom.config import EngineConfig
from atom.options.fields import options_of

ROOT = Path(__file__).parents[1]


def test_the_site_is_built_with_every_link_right(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(pages) > 20
    assert "top_p" in pages[tmp_path / "docs" / "api" / "index.html"]
    options = pages[tmp_path / "docs" / "options" / "index.html"]
    flags = [each.flag for each in options_of(EngineConfig)]
    assert [flag for flag in flags if f"<code>{flag}<" not in options] == []
    foreign = pages[tmp_path / "docs" / "from-other-engines" / "index.html"]
    assert [name for name in BY_NAME if f"<code>{name}<" not in foreign] == []
    assert (tmp_path / "docs" / "pictures" / "step.svg").exists()
    loads = re.compile(r'<(?:script|img|link)[^>]* (?:src|href)="https?://(?!127\.0\.0\.1)[^"]*"')
    assert {path: found for path, text in pages.items() if (found := loads.findall(text))} == {}
    shown = re.compile(r'<(?:img|source)[^>]* (?:src|srcset)="([^":]+)"')
    for path, text in pages.items():
        for picture in shown.findall(text):
            assert (path.parent / picture).exists(), (path, picture)
