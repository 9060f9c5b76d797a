"""Lays the site out as the repository is, so that one link is right in both."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/**/*.*",
    "recipes/*.*",
    "deploy/helm/atom/examples/*.yaml",
    "LICENSE",
)


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


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links to folders of the repository, which have no page, become plain text."""
    folder = (ROOT / page.file.src_uri).parent

    def plain(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    return re.sub(r"\[([^\]]+)\]\(([^)#:]+)\)", plain, markdown)
