"""docs/first-ten-minutes.md, typed into two terminals as it stands there, in clean places."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock
from terminal import Terminal

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first-ten-minutes.md"
ANSWERED = re.compile(r"\(\d+ tokens, [\d.]+ a second")
INSTALL_SECONDS = 1500.0
START_SECONDS = 400.0
STEP_SECONDS = 120.0


class Block(NamedTuple):
    title: str
    lines: str


def read_blocks() -> list[Block]:
    found = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE.read_text(), re.M | re.S)
    return [Block(*each) for each in found]


def clean_environment(home: Path) -> dict[str, str]:
    """Nothing of this interpreter's or of an earlier start's; only how pip gets at packages."""
    tools = [path for path in os.environ["PATH"].split(":") if not path.endswith(".venv/bin")]
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    cache = subprocess.run(
        [sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=True
    )
    ways = {name: value for name, value in os.environ.items() if _WAYS.search(name)}
    return ways | {
        "HOME": str(home),
        "PATH": ":".join([str(Path(sys.base_prefix, "bin")), *tools]),
        "TERM": "xterm",
        "ATOM_CACHE": str(home / "cache"),
        "XDG_CONFIG_HOME": config,
        "PIP_CACHE_DIR": cache.stdout.strip(),
    }


_WAYS = re.compile(r"^PIP_|_proxy$|^SSL_CERT|^REQUESTS_CA", re.IGNORECASE)


@pytest.fixture
def home(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of its own; one player at a time, since the page's server has a fixed port."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "port-8000.lock"):
        yield tmp_path
    shutil.rmtree(tmp_path)  # an environment takes more than a gigabyte


def test_the_page_has_its_steps_in_order() -> None:
    blocks = read_blocks()
    assert [block.title for block in blocks] == [
        "Terminal 1, from a clone",
        "Terminal 1, from the wheel",
        *["Terminal 1", "Terminal 1", "Type", "Terminal 1"],
        *["Terminal 2"] * 4,
        "Type",
    ]
    assert PAGE.read_text().count("\n```") == 2 * len(blocks)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("origin", ["from a clone", "from the wheel"])
def test_no_step_needs_a_second_try(home: Path, origin: str) -> None:
    env = clean_environment(home)
    if origin == "from a clone":
        env["ATOM_REPOSITORY"] = str(ROOT)
        enter = "cd atom && . .venv/bin/activate"
    else:
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(home), "."]
        subprocess.run(pip, cwd=ROOT, check=True, capture_output=True)
        env["ATOM_WHEEL"] = str(next(home.glob("*.whl")))
        enter = ". atom-env/bin/activate"
    titles = {f"Terminal 1, {origin}", "Terminal 1", "Terminal 2", "Type"}
    steps = iter([block for block in read_blocks() if block.title in titles])

    with Terminal(home, env) as first, Terminal(home, env) as second:
        first.run(next(steps).lines, INSTALL_SECONDS)
        assert re.search(r"^atom \d+\.\d+\.\d+$", first.run(next(steps).lines, STEP_SECONDS), re.M)
        chat(first, next(steps).lines, next(steps).lines)
        first.begin(next(steps).lines)
        first.wait_for(r"Ready: http://127.0.0.1:8000 serves", START_SECONDS)
        second.run(enter, STEP_SECONDS)
        assert '"content":' in second.run(next(steps).lines, STEP_SECONDS)
        assert "<title>" in second.run(next(steps).lines, STEP_SECONDS)
        assert len(second.run(next(steps).lines, INSTALL_SECONDS).split()) > 20
        counts = re.findall(r"_total \d+", second.run(next(steps).lines, STEP_SECONDS))
        assert len(counts) == 2
        assert next(steps).lines == "Ctrl-C\n"
        start = len(first.text)
        first.type("\x03", end="")
        first.wait_end(STEP_SECONDS, start)


def chat(terminal: Terminal, command: str, typed: str) -> None:
    terminal.begin(command)
    start = len(terminal.text)
    for line in typed.splitlines():
        start = terminal.wait_for(r"> \Z", START_SECONDS, start).end()
        terminal.type(line)
        if not line.startswith("/") or line == "/retry":
            start = terminal.wait_for(ANSWERED.pattern, STEP_SECONDS, start).end()
    terminal.wait_end(STEP_SECONDS, start)
