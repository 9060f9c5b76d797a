"""`/generate` as SGLang's clients use it, and `/tokenizer_info` as lm_eval's do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.http.unknown_fields import IGNORED_FIELDS_HEADER
from atom.entrypoints.server_options import ServerOptions

TEXT = "A language model answers questions, 北京 🙂."


@pytest.fixture(scope="module")
def scripted(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    server = ScriptedServer(byte_level_tokenizer, ServerOptions())
    server.says(TEXT, 3)
    try:
        yield server
    finally:
        server.stop()


def _generate(server: ScriptedServer, **fields: Any) -> Any:
    answer = server.post("/generate", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _events(server: ScriptedServer, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post("/generate", json={**fields, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_whole_answer(
    scripted: ScriptedServer, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    found = _generate(scripted, text="Hi", rid="mine", sampling_params={"temperature": 0})
    ids = byte_level_tokenizer.encode(TEXT, add_special_tokens=False)
    eos = byte_level_tokenizer.eos_token_id
    assert (found["text"], found["output_ids"]) == (TEXT, [*ids, eos])
    meta = found["meta_info"]
    assert (meta["id"], meta["finish_reason"]) == ("mine", {"type": "stop", "matched": eos})
    assert (meta["completion_tokens"], meta["cached_tokens"]) == (len(ids) + 1, 0)
    assert meta["prompt_tokens"] == len(byte_level_tokenizer.encode("Hi"))


def test_requests_at_a_time_may_have_one_name(scripted: ScriptedServer) -> None:
    scripted.says(TEXT * 20, 3)
    with ThreadPoolExecutor(4) as pool:
        fields = {"text": "Hi", "rid": "mine", "sampling_params": {"max_new_tokens": 100}}
        found = list(pool.map(lambda _: _generate(scripted, **fields), range(4)))
    scripted.says(TEXT, 3)
    assert [one["meta_info"]["id"] for one in found] == ["mine"] * 4
    assert len({one["text"] for one in found}) == 1


def test_streams_repeat_the_text_so_far(scripted: ScriptedServer) -> None:
    events = _events(scripted, input_ids=[5, 6], sampling_params={"max_new_tokens": 7})
    texts = [event["text"] for event in events]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert all(len(e["output_ids"]) == e["meta_info"]["completion_tokens"] for e in events)
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + [{"type": "length", "length": 7}]
    whole = _generate(scripted, input_ids=[5, 6], sampling_params={"max_new_tokens": 7})
    assert (events[-1]["text"], events[-1]["output_ids"]) == (whole["text"], whole["output_ids"])


@pytest.mark.parametrize(
    "fields",
    [{"text": ["a", "b"]}, {"input_ids": [[5], [6]]}, {"text": "a", "sampling_params": {"n": 2}}],
)
def test_batches_are_lists(scripted: ScriptedServer, fields: dict[str, Any]) -> None:
    found = _generate(scripted, **fields)
    assert [one["text"] for one in found] == [TEXT, TEXT]
    last = {event["index"]: event["text"] for event in _events(scripted, **fields)}
    assert last == {0: TEXT, 1: TEXT}


def test_a_batch_of_one_is_a_list(scripted: ScriptedServer) -> None:
    assert len(_generate(scripted, text=["a"])) == 1
    assert len(_generate(scripted, input_ids=[[5]])) == 1
    assert "text" in _generate(scripted, input_ids=[5])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [5]}, "text"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -2}},
            "sampling_params.max_new_tokens",
        ),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ({"text": "a", "sampling_params": {"no_stop_trim": True}}, "sampling_params.no_stop_trim"),
        ({"text": "a", "return_logprob": True}, "return_logprob"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
    ],
)
def test_refused(scripted: ScriptedServer, fields: dict[str, Any], param: str) -> None:
    answer = scripted.post("/generate", json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_unknown_sampling_fields_are_named(scripted: ScriptedServer) -> None:
    sampling = {"mood": 1, "spaces_between_special_tokens": True}
    answer = scripted.post("/generate", json={"text": "a", "sampling_params": sampling})
    assert answer.headers[IGNORED_FIELDS_HEADER] == "sampling_params.mood"


def test_without_a_limit_there_are_128_tokens(scripted: ScriptedServer) -> None:
    scripted.says("a b" * 200)
    assert _generate(scripted, text="a")["meta_info"]["completion_tokens"] == 128
    unlimited = _generate(scripted, text="a", sampling_params={"max_new_tokens": -1})
    assert unlimited["meta_info"]["finish_reason"]["type"] == "stop"
    scripted.says(TEXT, 3)


def test_tokenizer_info(
    scripted: ScriptedServer, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    info = httpx.get(f"{scripted.url}/tokenizer_info").json()
    assert info["eos_token"] == byte_level_tokenizer.eos_token
    assert info["bos_token"] == byte_level_tokenizer.bos_token
    assert info["chat_template"] == byte_level_tokenizer.chat_template
    asked = {"prompt": info["eos_token"], "add_special_tokens": False}
    tokens = scripted.post("/tokenize", json=asked).json()["tokens"]
    assert tokens == [byte_level_tokenizer.eos_token_id]
    assert scripted.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "<|im_end|>"
