"""The model's sampling parameters apply on every route, where a request says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.chat.params import sampling_params
from atom.entrypoints.chat.protocol import CompletionRequest
from atom.entrypoints.http.errors import ApiError
from atom.entrypoints.openai.responses.api import response_fields
from atom.entrypoints.openai.responses.protocol import ResponsesRequest
from atom.entrypoints.server_options import ServerOptions

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
    assert params(bad_words=[]).bad_words == []
    with pytest.raises(ApiError, match="allowed_token_ids must hold at least one token id"):
        params(allowed_token_ids=[])
    with pytest.raises(ApiError, match="bad_words must hold non-empty strings") as error:
        params(bad_words=[""])
    assert error.value.param == "bad_words"
    with pytest.raises(ApiError, match="logprobs must be at least 0"):
        sampling_params(CompletionRequest(prompt="a"), {}, {}, max_tokens=4, logprobs=-1)


def test_responses_say_what_applied() -> None:
    fields = response_fields(ResponsesRequest.model_validate({"input": "a"}), "m", DEFAULTS)
    assert (fields["temperature"], fields["top_p"]) == (0.0, 0.5)


@pytest.fixture(scope="module")
def server(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    """A server of a model whose own parameters make it greedy."""
    server = ScriptedServer(byte_level_tokenizer, ServerOptions(), sampling_defaults=DEFAULTS)
    server.says("yes")
    try:
        yield server
    finally:
        server.stop()


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "fox", "max_tokens": 12},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 12},
    "/v1/responses": {"input": "fox", "max_output_tokens": 16},
    "/generate": {"text": "fox", "sampling_params": {"max_new_tokens": 12}},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 12},
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_samples_alike(server: ScriptedServer, route: str) -> None:
    """By the model's parameters; by those of a request where it has any."""

    def used(**fields: Any) -> tuple[float, float, float]:
        body = {**ROUTES[route], **fields}
        if route == "/generate":
            sampling = {**ROUTES[route]["sampling_params"], **fields}
            body = {**ROUTES[route], "sampling_params": sampling}
        server.model.params = None
        answer = server.post(route, json=body)
        assert answer.status_code == 200, answer.text
        said = server.model.params
        assert said is not None
        return said.temperature, said.top_p, said.repetition_penalty

    assert used() == (0.0, 0.5, 1.5)
    assert used(temperature=0.75) == (0.75, 0.5, 1.5)
