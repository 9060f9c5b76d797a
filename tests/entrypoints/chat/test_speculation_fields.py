"""What streams say of how their tokens came, and requests that want no drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.server_options import ServerOptions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "<think>Some thoughts.</think>Naïve 日本語 answers, and more of them. 😀 The end."
# (drafts, accepted ones, source) of the steps after the first.
STEPS = [(3, 3, "eagle3"), (3, 1, "eagle3"), (2, 0, "lookup"), (0, 0, "eagle3")]


@pytest.fixture(scope="module")
def scripted(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    options = ServerOptions(reasoning_parser="deepseek_r1", unknown_fields="refuse")
    server = ScriptedServer(byte_level_tokenizer, options)
    server.says(TEXT)
    server.model.drafts = lambda number: STEPS[number % len(STEPS)]
    yield server
    server.stop()


def _body(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "Say it."}]}
    return {**(asked if path == CHAT else {"prompt": "Say it."}), **fields}


def _chunks(server: ScriptedServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    options = {"include_usage": True, "include_speculation": True}
    answer = server.post(path, json=_body(path, stream=True, stream_options=options, **fields))
    assert answer.status_code == 200, answer.text
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_chunks_say_how_their_tokens_came(scripted: ScriptedServer, path: str) -> None:
    *chunks, last = _chunks(scripted, path)
    parts = [c["speculation"] for chunk in chunks for c in chunk["choices"] if "speculation" in c]
    steps = [step for part in parts for step in part["steps"]]
    for part in parts:
        tokens = sum(len(step["tokens"]) for step in part["steps"])
        assert part["sampled"] + part["corrected"] + sum(part["accepted"].values()) == tokens
    assert steps[0].keys() == {"tokens"}
    for number, step in enumerate(steps[1:-1], 1):
        num_drafts, num_accepted, source = STEPS[number % len(STEPS)]
        assert len(step["tokens"]) == num_accepted + 1
        if num_drafts:
            assert (step["num_drafts"], step["num_accepted"]) == (num_drafts, num_accepted)
            assert step["source"] == source
    assert "".join(t for step in steps for t in step["tokens"]) == TEXT + "<|im_end|>"
    usage = last["usage"]
    total = usage["speculation"]
    assert {"eagle3"} == set(total["accepted"])
    for name in ("sampled", "corrected"):
        assert total[name] == sum(part[name] for part in parts) > 0
    counted = total["sampled"] + total["corrected"] + sum(total["accepted"].values())
    assert counted == usage["completion_tokens"] == sum(len(step["tokens"]) for step in steps)
    assert total["num_steps"] == len(steps)
    verified = [sum(step.get("num_drafts", 0) > i for step in steps) for i in range(3)]
    accepted = [sum(step.get("num_accepted", 0) > i for step in steps) for i in range(3)]
    assert total["verified_per_position"] == verified
    assert total["accepted_per_position"] == accepted


def test_the_tokens_of_the_step_that_ends_are_those_of_the_text(scripted: ScriptedServer) -> None:
    """Three drafts are accepted, and the text is cut after two of them."""
    *_, last = _chunks(scripted, CHAT, max_tokens=7)
    total = last["usage"]["speculation"]
    assert last["usage"]["completion_tokens"] == 7
    assert (total["sampled"], total["corrected"], total["accepted"]) == (2, 2, {"eagle3": 3})


def test_choices_are_told_apart(scripted: ScriptedServer) -> None:
    *chunks, last = _chunks(scripted, CHAT, n=2)
    counts = [0, 0]
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        steps = choice.get("speculation", {"steps": []})["steps"]
        counts[choice["index"]] += sum(len(step["tokens"]) for step in steps)
    assert counts[0] == counts[1] == last["usage"]["completion_tokens"] / 2


def test_who_does_not_ask_is_not_told(scripted: ScriptedServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = _body(CHAT, stream=True, stream_options=options)
    assert "speculation" not in scripted.post(CHAT, json=body).text
    assert "speculation" not in scripted.post(CHAT, json=_body(CHAT)).text


def test_usage_of_every_chunk_counts_its_own_tokens(scripted: ScriptedServer) -> None:
    options = {"continuous_usage_stats": True, "include_speculation": True}
    text = scripted.post(CHAT, json=_body(CHAT, stream=True, stream_options=options)).text
    for event in text.split("\n\n")[:-2]:
        usage = json.loads(event.removeprefix("data: "))["usage"]
        total = usage["speculation"]
        counted = total["sampled"] + total["corrected"] + sum(total["accepted"].values())
        assert counted == usage["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_refused_without_a_stream(scripted: ScriptedServer, path: str) -> None:
    asked = {"stream_options": {"include_speculation": True}}
    answer = scripted.post(path, json=_body(path, **asked))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "stream_options.include_speculation"
    assert "stream=true" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_request_switches_drafts_off_for_itself(scripted: ScriptedServer, path: str) -> None:
    *_, last = _chunks(scripted, path, speculation=False)
    assert scripted.model.params is not None
    assert not scripted.model.params.speculation
    total = last["usage"]["speculation"]
    assert (total["corrected"], total["accepted"]) == (0, {})
    assert total["num_steps"] == total["sampled"] == last["usage"]["completion_tokens"]
    _chunks(scripted, path, speculation=None)
    assert scripted.model.params.speculation
    answer = scripted.post(path, json=_body(path, speculation="no"))
    assert answer.json()["error"]["param"] == "speculation"
