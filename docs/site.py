"""Lays the site out as the repository is, so that one link is right in both."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.*", "recipes/*.*", "LICENSE")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages, and the files that they link to, at their paths in the repository."""
    paths = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    ours = [
        File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
        for path in paths
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*ours, *theme])
