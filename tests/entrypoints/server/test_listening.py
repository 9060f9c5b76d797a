"""Where the server listens: Unix domain sockets, and paths of a proxy."""

from __future__ import annotations

import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from atom.entrypoints.http.root_path import RootPathMiddleware
from atom.entrypoints.server.listening import bind, bind_uds
from atom.entrypoints.server.serve import _is_open


def test_a_server_on_a_socket_with_its_flags_in_a_file(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    config = tmp_path / "atom.yaml"
    config.write_text("num-threads: 1\nkv-cache-memory: 4MiB\nroot-path: /llm\napi-key: [k]\n")
    path = tmp_path / "s"
    command = [sys.executable, "-m", "atom.entrypoints.openai_server", str(tiny_llama_dir)]
    with subprocess.Popen(
        [*command, "--config", str(config), "--uds", str(path)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if "Ready: " in line:
                break
        assert f"Ready: unix:{path} serves" in log[-1], log
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as client:
            headers = {"authorization": "Bearer k"}
            assert client.get("http://atom/llm/health").status_code == 200
            assert client.get("http://atom/health").status_code == 200
            assert client.get("http://atom/llm/v1/models").status_code == 401
            models = client.get("http://atom/llm/v1/models", headers=headers)
            assert len(models.json()["data"]) == 1
            document = client.get("http://atom/openapi.json", headers=headers).json()
            assert document["servers"] == [{"url": "/llm"}]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, process.stderr.read()
    assert not path.exists()


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_what_other_machines_may_reach(host: str, is_open: bool) -> None:
    with bind(host, 0) as sock:
        assert _is_open(sock) is is_open


def test_a_socket_that_a_dead_server_left_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    bind_uds(path).close()
    with bind_uds(path) as sock:
        sock.listen()
        assert stat.S_ISSOCK(Path(path).stat().st_mode)
        with pytest.raises(OSError, match="in use"):
            bind_uds(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def test_what_is_no_socket_stays(tmp_path: Path) -> None:
    file = tmp_path / "s"
    file.write_text("mine")
    with pytest.raises(OSError, match="in use"):
        bind_uds(str(file))
    assert file.read_text() == "mine"


def test_a_path_of_a_proxy() -> None:
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: "models")
    app.add_middleware(RootPathMiddleware, root_path="/llm")
    client = TestClient(app)
    for path, status in (
        ("/llm/v1/models", 200),
        ("/v1/models", 200),
        ("/llmv1/models", 404),
        ("/x/llm/v1/models", 404),
    ):
        assert client.get(path).status_code == status, path
