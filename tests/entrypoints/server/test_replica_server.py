"""A server with two replicas: one is killed under load."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from endless import SERVER_FLAGS
from patience import PATIENCE_SECONDS, wait_until
from server_process import START_SECONDS, ServerProcess

NUM_REQUESTS = 16
# Of the four of a replica, none ends before the load of both is seen.
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def two(endless_llama_dir: Path) -> Iterator[ServerProcess]:
    flags = ["--data-parallel-size", "2", "--dtype", "float32", "--max-num-seqs", "4"]
    process = ServerProcess(endless_llama_dir, *SERVER_FLAGS, *flags)
    try:
        yield process.wait_ready()
    finally:
        process.stop()


def by_replica(server: ServerProcess, name: str) -> list[float]:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = re.findall(rf'^atom:{name}{{replica="(\d)"}} (\S+)$', text, re.MULTILINE)
    return [float(value) for _, value in sorted(found)]


def health(server: ServerProcess) -> Any:
    answer = httpx.get(f"{server.url}/health", timeout=60)
    assert answer.status_code == 200
    return answer.json()


def test_a_repeated_prefix_is_found(two: ServerProcess) -> None:
    """Whichever replica has it: the questions to other prompts would lead elsewhere by turns."""
    assert health(two) == {
        "status": "ok",
        "replicas": 2,
        "healthy_replicas": 2,
        "problems": [None, None],
    }
    found = []
    for repeat in range(4):
        for number in range(5):
            prompt = [number + 5] * 96 + [repeat + 20] * 10
            body = {"prompt": prompt, "max_tokens": 1}
            usage = two.post("/v1/completions", json=body).json()["usage"]
            if repeat:
                found.append(usage["prompt_tokens_details"]["cached_tokens"] >= 80)
    assert all(found)
    for name in ("engine 0", "engine 1"):
        assert any(f"[{name}]" in line for line in two.log)
    assert all(hits > 0 for hits in by_replica(two, "prefix_cache_hits_total"))


def test_killing_a_replica_under_load_loses_nothing(two: ServerProcess) -> None:
    """16 whole answers, 8 of them in two batches, 8 waiting; and a stream that had begun."""

    def ask(number: int) -> httpx.Response:
        return two.post("/v1/completions", json={**LONG, "prompt": [number + 5, 7]})

    streamed: list[str] = []

    def read() -> None:
        body = {**LONG, "prompt": [99, 98], "stream": True}
        with httpx.stream("POST", f"{two.url}/v1/completions", json=body, timeout=60) as answer:
            streamed.extend(line for line in answer.iter_lines() if line)

    expected = [ask(number).json()["choices"][0]["text"] for number in range(2)]
    reader = threading.Thread(target=read)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = [pool.submit(ask, number) for number in range(NUM_REQUESTS)]
        wait_until(lambda: min(by_replica(two, "num_requests_running")) == 4)
        reader.start()
        two.engines[0].kill()
        results = [answer.result() for answer in answers]
    reader.join(PATIENCE_SECONDS)
    for answer in results:
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == LONG["max_tokens"]
    assert [answer.json()["choices"][0]["text"] for answer in results[:2]] == expected
    assert streamed[-1] == "data: [DONE]"  # it had not begun
    assert health(two)["replicas"] == 2
    wait_until(lambda: health(two)["healthy_replicas"] == 2, START_SECONDS)
    assert sum(by_replica(two, "replica_restarts_total")) == 1
    assert len(two.engines) == 2
    assert ask(0).json()["choices"][0]["text"] == expected[0]
