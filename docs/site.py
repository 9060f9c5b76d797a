"""Lays the site out as the repository is, so that one link is right in both."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from atom.command_line.foreign_flags import FOREIGN_FLAGS, Fate
from atom.config import EngineConfig
from atom.model_engine.arg_utils import SUBJECTS
from atom.options.fields import Option, options_of

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/**/*.*",
    "recipes/*.*",
    "deploy/helm/atom/examples/*.yaml",
    "LICENSE",
)
OPTIONS = "<!-- engine options -->"
FOREIGN = "<!-- foreign flags -->"


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
    """Links to folders of the repository, which have no page, become plain text, and `OPTIONS` and
    `FOREIGN` the tables that they stand for.
    """
    folder = (ROOT / page.file.src_uri).parent

    def plain(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    linked = re.sub(r"\[([^\]]+)\]\(([^)#:]+)\)", plain, markdown)
    return linked.replace(OPTIONS, engine_options()).replace(FOREIGN, foreign_flags())


def foreign_flags() -> str:
    """A table of other engines' flags for each engine; flags of which the same is said share a
    line.
    """
    rows: dict[str, dict[tuple[str, str], list[str]]] = {}
    for each in FOREIGN_FLAGS:
        says = f"`{each.says}`" if each.fate is Fate.SAME else each.says
        if each.harmless and each.fate is Fate.REFUSED:
            says += f"; accepted with {', '.join(each.harmless)}"
        lines = rows.setdefault(each.engine, {})
        lines.setdefault((each.fate.value, says), []).extend(f"`{name}`" for name in each.names)
    tables = [
        "\n".join(
            [
                f"### {engine}\n",
                "| flag | here | |",
                "|---|---|---|",
                *(
                    f"| {', '.join(names)} | {fate} | {says} |"
                    for (fate, says), names in lines.items()
                ),
            ]
        )
        for engine, lines in rows.items()
    ]
    return "\n\n".join(tables)


def engine_options() -> str:
    """A table of the engine's options for each subject, as in the help of `atom serve`."""
    rows: dict[str, list[str]] = {subject: [] for subject in SUBJECTS.values()}
    for each in options_of(EngineConfig):
        group = each.field.name if each.is_document else each.group
        rows[SUBJECTS[group]].append(_row(each))
    head = ["| flag | default | meaning |", "|---|---|---|"]
    tables = [
        "\n".join([f"## {subject[0].upper()}{subject[1:]}", "", *head, *lines])
        for subject, lines in rows.items()
    ]
    return "\n\n".join(tables)


def _row(each: Option) -> str:
    declared = each.declared
    flags = [each.flag, *([declared.short] if declared.short else [])]
    if each.kind is bool:
        flags.append(each.flag.replace("--", "--no-", 1))
    default = "" if each.default is None else str(each.default)
    if each.kind is bool and each.default is not None:
        default = "on" if each.default else "off"
    if declared.on_gpu is not None:
        default += f", on a GPU {declared.on_gpu}"
    choices = f" ({', '.join(declared.choices)})" if declared.choices else ""
    names = ", ".join(f"`{flag}`" for flag in flags)
    return f"| {names} | {default} | {declared.help}{choices} |"
