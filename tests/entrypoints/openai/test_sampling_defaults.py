"""The model's sampling parameters apply on every route, where a request says nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess

from atom.entrypoints.openai.chat.params import sampling_params
from atom.entrypoints.openai.chat.protocol import CompletionRequest
from atom.entrypoints.openai.http.errors import ApiError
from atom.entrypoints.openai.responses.api import response_fields
from atom.entrypoints.openai.responses.protocol import ResponsesRequest

DEFAULTS = {"temperature": 0.0, "top_p": 0.5, "repetition_penalty": 1.5}
MESSAGES = [{"role": "user", "content": "fox"}]


def params(**fields: Any) -> Any:
    body = CompletionRequest.model_validate({"prompt": "a", **fields})
    return sampling_params(body, {}, DEFAULTS, max_tokens=4)


def test_what_a_request_says_wins() -> None:
    said = params(temperature=0.7, repetition_penalty=None)
    assert (said.temperature, said.top_p, said.repetition_penalty) == (0.7, 0.5, 1.5)
    assert (said.top_k, said.min_p) == (0, 0.0)


def test_wishes_about_tokens_are_fields_of_requests() -> None:
    said = params(allowed_token_ids=[3, 4], bad_words=["no"])
    assert (said.allowed_token_ids, said.bad_words) == ([3, 4], ["no"])
    assert params(allowed_token_ids=[], bad_words=[]).allowed_token_ids is None
    with pytest.raises(ApiError, match="bad_words must hold non-empty strings") as error:
        params(bad_words=[""])
    assert error.value.param == "bad_words"
    with pytest.raises(ApiError, match="logprobs must be at least 0"):
        sampling_params(CompletionRequest(prompt="a"), {}, {}, max_tokens=4, logprobs=-1)


def test_responses_say_what_applied() -> None:
    fields = response_fields(ResponsesRequest.model_validate({"input": "a"}), "m", DEFAULTS)
    assert (fields["temperature"], fields["top_p"]) == (0.0, 0.5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Iterator[str]:
    """A server of a model whose own parameters make it greedy."""
    folder = Path(shutil.copytree(tiny_llama_dir, tmp_path_factory.mktemp("greedy") / "model"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.0}))
    process = ServerProcess(folder, "--served-model-name", "tiny")
    try:
        yield process.wait_ready().url
    finally:
        process.stop()


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "fox", "max_tokens": 12},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 12},
    "/v1/responses": {"input": "fox", "max_output_tokens": 16},
    "/generate": {"text": "fox", "sampling_params": {"max_new_tokens": 12}},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 12},
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_samples_alike(server: str, route: str) -> None:
    """At the default of 0 all answers are alike; at a temperature of the request's own not."""

    def answers(**fields: Any) -> set[str]:
        body = {"model": "tiny", **ROUTES[route], **fields}
        if route == "/generate":
            sampling = {**ROUTES[route]["sampling_params"], **fields}
            body = {**ROUTES[route], "sampling_params": sampling}
        found = [httpx.post(server + route, json=body, timeout=60).json() for _ in range(3)]
        return {json.dumps(_text_of(answer)) for answer in found}

    assert len(answers()) == 1
    assert len(answers(temperature=1.0)) == 3


def _text_of(value: Any) -> list[str]:
    """Every `text` and `content` in an answer; the rest differs each time."""
    if isinstance(value, list):
        return [text for item in value for text in _text_of(item)]
    if not isinstance(value, dict):
        return []
    own = [v for k, v in value.items() if k in ("text", "content") and isinstance(v, str)]
    return own + [text for item in value.values() for text in _text_of(item)]
