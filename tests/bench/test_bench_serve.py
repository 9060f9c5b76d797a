"""The load generator against a stub server of known latencies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from patience import wait_until

from atom.bench import report as report_module
from atom.bench import serve as serving

FIRST, GAP, TOKENS = 0.06, 0.02, 5


class Stub:
    """Answers every chat with TOKENS tokens; refuses those that say so."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.app = FastAPI()
        self.app.get("/v1/models")(lambda: {"data": [{"id": "stub"}]})
        self.app.post("/v1/chat/completions")(self.chat)

    async def chat(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        if body["messages"][0]["content"] == "refuse":
            return JSONResponse({"error": {"message": "no"}}, 400)
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def stream(self) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(FIRST)
        for i in range(TOKENS):
            if i:
                await asyncio.sleep(GAP)
            yield event({"choices": [{"delta": {"content": "x"}}]})
        usage = {"prompt_tokens": 3, "completion_tokens": TOKENS}
        self.running -= 1
        yield event({"choices": [], "usage": usage}) + "data: [DONE]\n\n"


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@pytest.mark.parametrize("load", [["--max-concurrency", "3"], ["--request-rate", "100"]])
def test_report_of_a_known_server(tmp_path: Path, load: list[str]) -> None:
    stub, path = Stub(), tmp_path / "sub" / "report.json"
    command = ["--num-prompts", "12", "--output-json", str(path), "--slo-ttft-ms", "60000"]
    with served(stub.app) as url:
        assert serving.main(["--base-url", url, *load, *command]) == 0
    report = json.loads(path.read_text())
    assert report["completed"] == 12
    assert report["output_tokens"] == 12 * TOKENS
    assert report["prompt_tokens"] == 36
    latencies = report["latencies"]
    # Lower bounds only: a busy machine may add to them.
    assert latencies["ttft_ms"]["median"] >= FIRST * 1e3
    # If it sees a first token late, those after it seem to come faster.
    decoding = latencies["e2el_ms"]["mean"] - latencies["ttft_ms"]["mean"]
    assert latencies["tpot_ms"]["mean"] == pytest.approx(decoding / (TOKENS - 1))
    assert latencies["itl_ms"]["p99"] >= latencies["itl_ms"]["median"]
    assert latencies["e2el_ms"]["mean"] >= (FIRST + GAP * (TOKENS - 1)) * 1e3 * 0.95
    assert report["goodput"]["good"] == 12
    assert len(stub.bodies) == 14  # two warm-ups
    assert stub.bodies[-1]["model"] == "stub"
    assert stub.bodies[-1]["stream_options"] == {"include_usage": True}
    if "--max-concurrency" in load:
        assert stub.most_running <= 3


def test_failures_are_counted_and_the_exit_status_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "hello"}\n{"question": "refuse"}\n', encoding="utf-8")
    source = ["--prompts-file", str(prompts), "--field", "question", "--num-warmups", "0"]
    with served(Stub().app) as url:
        assert serving.main(["--base-url", url, *source, "--num-prompts", "4"]) == 1
    printed = capsys.readouterr().out
    assert "| failed | 2 |" in printed
    assert "2 x ValueError: HTTP 400" in printed


def test_no_server_is_said_plainly() -> None:
    with pytest.raises(SystemExit, match="no model at http"):
        serving.main(["--base-url", "http://127.0.0.1:9/v1"])


def test_evaluate_and_goodput() -> None:
    exchange = serving.Exchange
    exchanges = [
        exchange(0.0, 0.0, 1.0, [0.2, 0.6, 1.0], prompt_tokens=5, output_tokens=5),
        exchange(1.0, 1.1, 4.0, [3.0], prompt_tokens=5, output_tokens=1),
        exchange(1.0, 1.0, 2.0, error="gone"),
    ]
    report = serving.evaluate(exchanges, {"ttft": 500.0, "tpot": 201.0})
    assert (report["completed"], report["failed"]) == (2, 1)
    assert report["errors"] == {"gone": 1}
    assert report["seconds"] == 4.0
    assert report["output_tokens_per_s"] == 1.5
    assert report["latencies"]["ttft_ms"]["mean"] == pytest.approx(1100)
    assert report["latencies"]["tpot_ms"]["median"] == pytest.approx(200)
    assert report["latencies"]["itl_ms"]["p99"] == pytest.approx(400)
    assert report["max_send_delay_ms"] == pytest.approx(100)
    assert report["goodput"]["good"] == 1


def test_percentiles_are_interpolated() -> None:
    assert report_module.percentile([4, 1, 3, 2], 50) == 2.5
    assert report_module.percentile([7], 99) == 7
    assert report_module.summarise([]) is None
    assert report_module.summarise(range(101))["p95"] == 95


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"messages": [{"role": "user", "content": "hi"}]}', "hi"),
        ('{"messages": "hi"}', "hi"),
        ('{"messages": ["hi", "second turn"]}', "hi"),
    ],
)
def test_prompts_of_a_file(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"\n{line}\n", encoding="utf-8")
    expected = [[{"role": "user", "content": text}]]
    assert report_module.read_conversations(path, "messages") == expected


@pytest.mark.parametrize("line", ["not json", '{"question": "hi"}', "[1]", '{"messages": []}'])
def test_bad_prompt_files_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1"):
        report_module.read_conversations(path, "messages")
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="no prompts"):
        report_module.read_conversations(path, "messages")


@pytest.mark.parametrize("key", [["--api-key", "s3cret"], ["--api-key=s3cret"]])
def test_reports_hold_no_key(monkeypatch: pytest.MonkeyPatch, key: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["serving.py", *key, "--seed", "1"])
    assert report_module.environment()["command"] == "python serving.py --api-key=... --seed 1"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (
            "cpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Xeon\n\nmodel\t: 1\n",
            "Xeon (family 6, model 207)",
        ),
        ("model name\t: ARMv8\nFeatures\t: fp\n", "ARMv8"),
    ],
)
def test_reports_name_a_processor_whose_name_is_a_brand(
    monkeypatch: pytest.MonkeyPatch, cpuinfo: str, name: str
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: cpuinfo)
    assert report_module._cpu_name() == name


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
def test_the_address_of_a_server(url: str) -> None:
    assert serving.api_url(url) == "http://a:1/v1"
