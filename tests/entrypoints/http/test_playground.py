"""The playground's files: who may see them, what they may load, and what they were built from."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.http.playground import FOLDER
from atom.entrypoints.server_options import ServerOptions

SOURCES = Path(__file__).parents[3] / "playground"
MAX_SCRIPT_BYTES = 150_000


def _get(tokenizer: PreTrainedTokenizerFast, options: ServerOptions, path: str) -> httpx.Response:
    server = ScriptedServer(tokenizer, options)
    try:
        return httpx.get(server.url + path)
    finally:
        server.stop()


def test_the_page_and_its_files_need_no_key(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    server = ScriptedServer(byte_level_tokenizer, ServerOptions(given_api_keys=("secret",)))
    try:
        page = httpx.get(f"{server.url}/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        files = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(files) == 3
        for name in files:
            answer = httpx.get(f"{server.url}/{name}")
            assert answer.status_code == 200, name
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = httpx.get(answer.url, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert httpx.get(f"{server.url}/playground/none.js").status_code == 404
        assert httpx.get(f"{server.url}/playground/..%2Fapi.py").status_code == 404
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
    finally:
        server.stop()


def test_no_ui_takes_it_away(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    options = ServerOptions(ui=False)
    assert set(_get(byte_level_tokenizer, options, "/").json()) == {"version"}
    assert _get(byte_level_tokenizer, options, "/playground/app.js").status_code == 404


def test_a_proxy_may_show_it_under_a_path(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    page = _get(byte_level_tokenizer, ServerOptions(root_path="/llm"), "/llm/")
    # Relative addresses, so that they stay below the path.
    assert page.status_code == 200
    assert all(
        not name.startswith("/") for name in re.findall(r'(?:src|href)="([^"]+)"', page.text)
    )


def test_it_is_small_and_names_no_other_host() -> None:
    assert (FOLDER / "app.js").stat().st_size < MAX_SCRIPT_BYTES
    for path in FOLDER.iterdir():
        hosts = set(re.findall(r"https?://([\w.-]+)", path.read_text(encoding="utf-8")))
        assert hosts <= {"www.w3.org"}, path  # names of namespaces


@pytest.mark.node
def test_it_is_built_from_its_sources(tmp_path: Path) -> None:
    folder = tmp_path / "playground"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("node_modules"))
    _npm(folder, "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    _npm(folder, "run", "check")
    _npm(folder, "run", "build", "--", str(tmp_path / "built"))
    built = {path.name: path.read_bytes() for path in (tmp_path / "built").iterdir()}
    committed = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    assert built.keys() == committed.keys()
    for name, content in built.items():
        assert content == committed[name], f"{name}: run npm run build in playground/"


def _npm(folder: Path, *arguments: str) -> None:
    ran = subprocess.run(
        ["npm", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=200
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
