"""The Ray Serve application on a cluster of this machine's processes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port

ray = pytest.importorskip("ray", reason="needs the extra `ray`")

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"prompt": "The quick", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(tiny_llama_dir: Path) -> Iterator[str]:
    from ray import serve

    from atom.entrypoints.ray_serve import build_app

    port = free_port()
    paths = os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])
    environment = {"env_vars": {"PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env=environment)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        args = {"model": str(tiny_llama_dir), "device": "cpu", "num_threads": "1"}
        args |= {"kv_cache_memory": "4MiB", "served_model_name": "tiny", "max_replicas": "2"}
        serve.run(build_app(args), name="atom")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def streamed(url: str, max_tokens: int, begun: threading.Event | None = None) -> str:
    text, ended = "", False
    body = {**BODY, "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            ended = ended or line == "data: [DONE]"
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if begun is not None:
                    begun.set()
    assert ended
    return text


def test_the_routes_are_the_servers(url: str) -> None:
    models = httpx.get(f"{url}/v1/models", timeout=60).json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "ok"}
    answer = httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 20}, timeout=60)
    assert answer.json()["choices"][0]["text"] == streamed(url, 20)
    assert len(answer.headers.get_list("x-request-id")) == 1
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": 5.5}, timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "invalid_type"


def test_a_replica_that_goes_lets_streams_end(url: str) -> None:
    from ray import serve

    begun, texts = threading.Event(), []
    reader = threading.Thread(target=lambda: texts.append(streamed(url, 400, begun)))
    reader.start()
    assert begun.wait(60)
    serve.delete("atom")
    reader.join(60)
    assert len(texts[0]) > 200
