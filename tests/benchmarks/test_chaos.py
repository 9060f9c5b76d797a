"""A server under attack, shortly; and that the program would notice what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from atom import LLM, SamplingParams


@pytest.fixture
def chaos(benchmark_module: Callable[[str], Any]) -> Any:
    return benchmark_module("chaos")


def test_clients_that_vanish_from_a_server_with_little_room(chaos: Any, tmp_path: Path) -> None:
    run = ["--tiny", "--requests", "240", "--distinct", "28", "--phases", "steady", "vanish"]
    status = chaos.main([*run, "--output", str(tmp_path / "report.md")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert [phase["wrong"] for phase in report["phases"]] == [[], []]
    assert status == 0
    steady, vanish = report["phases"]
    assert steady["results"] == [["none", "right", steady["requests"]]]
    assert {kind for kind, n in steady["kinds"].items() if n} >= {"tools", "anthropic", "generate"}
    assert len({fault for fault, _, _ in vanish["results"]}) >= 5
    assert "## vanish" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "hybrid", "images"])
def test_all_phases(chaos: Any, kind: str) -> None:
    assert chaos.main(["--tiny", kind, "--requests", "1000", "--seed", "1"]) == 0


@pytest.mark.usefixtures("chaos")
def test_requests_with_images() -> None:
    from _chaos.plan import make_asks

    plain, seeing = (make_asks(3, 26, longest=10, sees=sees) for sees in (False, True))
    assert not any(ask.sees for ask in plain)
    assert "image" not in json.dumps([ask.body for ask in plain])
    shown = [ask for ask in seeing if ask.sees]
    assert {ask.path for ask in shown} == {ask.path for ask in plain} - {"/v1/completions"}
    assert any(ask.is_constrained for ask in shown)
    files = [re.findall(r"iVBOR[\w+/=]+", json.dumps(ask.body)) for ask in shown]
    assert {len(of_one) for of_one in files} == {1, 2}
    counts = Counter(file for of_one in files for file in of_one)
    assert len(counts) > 4
    assert max(counts.values()) > 1
    assert seeing == make_asks(3, 26, longest=10, sees=True)
    # Those without are as they are for other models.
    assert seeing[:7] == plain[:7]


@pytest.mark.usefixtures("chaos")
def test_a_tiny_model_sees(tmp_path: Path) -> None:
    from _chaos.plan import PICTURE
    from _chaos.tiny import write_tiny

    flags: dict[str, Any] = {"max_model_len": 100, "kv_cache_memory": "1MiB"}
    with LLM(str(write_tiny(tmp_path, "images")), **flags) as llm:
        prompts = [
            {
                "prompt": f"the {PICTURE}",
                "multi_modal_data": {"image": Image.new("RGB", (20, 30), c)},
            }
            for c in ("red", "blue", "red")
        ]
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        red, blue, again = llm.generate(prompts, sampling, use_tqdm=False)
    assert red.outputs[0].token_ids == again.outputs[0].token_ids != blue.outputs[0].token_ids


@pytest.mark.usefixtures("chaos")
def test_a_tiny_model_has_states(tmp_path: Path) -> None:
    from _chaos.tiny import write_tiny

    folder = write_tiny(tmp_path, "hybrid")
    config = json.loads((folder / "config.json").read_text())
    assert set(config["layer_types"]) == {"linear_attention", "full_attention"}
    assert write_tiny(tmp_path / "llama").joinpath("config.json").read_text().count('"llama"') == 1


@pytest.mark.usefixtures("chaos")
def test_a_wrong_answer_is_noticed(tmp_path: Path) -> None:
    from _chaos.clients import Outcome
    from _chaos.lab import Lab, Record
    from _chaos.plan import make_asks

    asks = make_asks(0, 7, longest=10)
    assert asks == make_asks(0, 7, longest=10)
    assert asks != make_asks(1, 7, longest=10)
    lab = Lab(asks, [], [], tmp_path, 0)
    lab._right[0] = {"text": "a"}
    record = Record("none")
    outcomes = [
        Outcome(asks[0], "none", 200, {"text": "a"}),
        Outcome(asks[0], "none", 200, {"text": "b"}),
        Outcome(asks[0], "none", 200, {"text": "c"}),
        Outcome(asks[0], "none", 429, error="queue_full: full"),
        Outcome(asks[0], "none", error="HUNG"),
        Outcome(asks[0], "none", 503, error="unavailable"),
        Outcome(asks[0], "none", error="connection: cut"),
        Outcome(asks[0], "vanishes", left=True),
    ]
    lab.judge(record, outcomes, lambda outcome: outcome.status != 429)
    results = {result: n for (_, result), n in record.results.items()}
    assert results == {
        "right": 1,
        "WRONG answer": 2,
        "WRONG: no answer": 2,
        "failed as it may (503)": 1,
        "failed as it may (cut)": 1,
        "left": 1,
    }
    assert record.kinds == {asks[0].kind: 8}
    assert record.num_requests == 8
    first, *_, queue, hung = record.wrong
    assert len(record.wrong) == 4
    assert "said  {'text': 'b'}\n  right {'text': 'a'}" in first
    assert "429 queue_full: full" in queue
    assert "None HUNG" in hung
    # While all was stopped from outside nobody answers; what is said has to be right all the same.
    record = Record("none")
    lab.stops.spans.append((5.0, 9.0))
    for number, said in enumerate((None, {"text": "b"})):
        stopped = Outcome(asks[0], "none", 500, said, "late", started=6.0, seconds=1.0)
        lab.judge(record, [stopped], None)
        assert len(record.wrong) == number
    assert ("none", "failed while everything was stopped from outside") in record.results


@pytest.mark.usefixtures("chaos")
def test_what_a_stream_says() -> None:
    from _chaos.answers import IncompleteError, said_by

    def stream(*events: Any, end: str = "data: [DONE]\n\n") -> bytes:
        return ("".join(f"data: {json.dumps(event)}\n\n" for event in events) + end).encode()

    def chunk(text: str, **choice: Any) -> dict[str, Any]:
        return {"id": text, "choices": [{"index": 0, "delta": {"content": text}, **choice}]}

    path = "/v1/chat/completions"
    end = chunk("c", finish_reason="stop")
    whole = said_by(path, stream(chunk("a"), chunk("b"), end), stream=True)
    assert whole == said_by(path, stream(chunk("ab"), end), stream=True)
    assert whole != said_by(path, stream(chunk("a"), end), stream=True)
    assert whole == [[0, {"delta": {"content": "abc"}, "finish_reason": "stop"}]]

    def call(text: str) -> dict[str, Any]:
        part = {"index": 0, "function": {"arguments": text}}
        return {"choices": [{"index": 1, "delta": {"tool_calls": [part]}}]}

    calls = {"0": {"index": 0, "function": {"arguments": "{}"}}}
    called = said_by(path, stream(call("{"), call("}")), stream=True)
    assert called == [[1, {"delta": {"tool_calls": calls}}]]
    # What an API leaves out in one chunk and has as null in another is the same.
    empty = {"choices": [{"index": 0, "delta": {"content": None, "refusal": None}}]}
    assert whole == said_by(path, stream(chunk("a"), empty, chunk("b"), end), stream=True)
    for cut in (
        stream(chunk("a"), end=""),
        stream(chunk("a"), {"error": {"message": "no"}}),
        stream(chunk("a"), {"type": "error"}),
        stream(chunk("a"))[:-1],
        b"",
    ):
        with pytest.raises(IncompleteError):
            said_by(path, cut, stream=True)


@pytest.mark.usefixtures("chaos")
def test_what_an_answer_says() -> None:
    from _chaos.answers import IncompleteError, said_by

    answer = {"id": "a", "created": 1, "choices": [{"text": "x", "usage": {"cached_tokens": 3}}]}
    body = json.dumps(answer).encode()
    assert said_by("/v1/completions", body, stream=False) == {
        "choices": [{"text": "x", "usage": {}}]
    }

    def stream(*events: dict[str, Any]) -> bytes:
        return "".join(f"event: x\ndata: {json.dumps(event)}\n\n" for event in events).encode()

    text = [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output": 1}},
    ]
    blocks, ends = said_by("/v1/messages", stream(*text, {"type": "message_stop"}), stream=True)
    assert blocks == [[0, {"type": "text", "text": "x"}]]
    assert ends == [text[-1]]
    delta = {"type": "response.output_text.delta", "output_index": 0, "delta": "x"}
    last = {"type": "response.completed", "response": {"id": "r", "status": "completed"}}
    said = said_by("/v1/responses", stream(delta, delta, last), stream=True)
    assert said == [{"0 response.output_text.delta": "xx"}, {"status": "completed"}]
    for path, cut in (
        ("/v1/messages", text),
        ("/v1/responses", [delta]),
        ("/v1/responses", [delta, last | {"type": "response.failed"}]),
    ):
        with pytest.raises(IncompleteError):
            said_by(path, stream(*cut), stream=True)


@pytest.mark.usefixtures("chaos")
def test_what_did_not_come_back() -> None:
    from _chaos.watch import Held

    before = Held(2, 20, 30, 6, 0, 0, 500 << 20, 0, 0, 0)
    assert not before.excess(before)
    after = Held(2, 20, 31, 6, 0, 1, 900 << 20, 0, 0, 3)
    assert set(after.excess(before)) == {"files", "temporary", "rss", "blocks"}
    assert after.excess(before)["files"] == (30, 31)
    assert set(Held(2, 21, 30, 6, 0, 0, 500 << 20, 0, 0, 0).excess(before)) == {"threads"}
    # A server that cannot be asked.
    assert not Held(2, 20, 30, 6, 0, 0, 500 << 20).excess(before)


@pytest.mark.usefixtures("chaos")
def test_a_server_that_grows() -> None:
    from _chaos.lab import Record
    from _chaos.phases import Growth

    def phase(requests: int, mebibytes: int) -> Record:
        record = Record("steady")
        record.results["none", "right"] = requests
        record.held.append({"after": {"rss": mebibytes << 20}})
        return record

    growth = Growth()
    for requests, mebibytes in ((900, 500), (100, 1000)):
        growth.follow(phase(requests, mebibytes))
        # Until a thousand requests it may grow.
        assert growth.record is None
    growth.follow(phase(10, 1010))
    assert growth.record is not None
    assert not growth.record.wrong
    growth.follow(phase(10, 1011))
    (wrong,) = growth.record.wrong
    assert "after 1020 requests the server has 1.011 of the memory" in wrong


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.usefixtures("chaos")
def test_a_clock_that_jumps(tmp_path: Path) -> None:
    from _chaos.clock import JumpingClock

    clock = JumpingClock(tmp_path)
    code = (
        "import datetime, sys, time\n"
        "start = time.monotonic()\n"
        "for line in sys.stdin:\n"
        "    now = datetime.datetime.now().timestamp()\n"
        "    print(time.time(), now, time.monotonic() - start, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=clock.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for shift in (0, 7200, -86400, 20 * 365 * 86400, 0):
            clock.jump(shift)
            process.stdin.write("\n")
            process.stdin.flush()
            told, also, passed = map(float, process.stdout.readline().split())
            assert abs(told - time.time() - shift) < 60
            assert abs(also - told) < 60
            assert 0 <= passed < 60
        process.stdin.close()
