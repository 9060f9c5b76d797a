from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess


@pytest.fixture(scope="session")
def server(tiny_llama_dir: Path) -> Iterator[ServerProcess]:
    """An open server of the tiny model, under the names `tiny` and `alias`."""
    process = ServerProcess(tiny_llama_dir, "--served-model-name", "tiny", "alias")
    try:
        yield process.wait_ready()
    finally:
        process.stop()


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client()
