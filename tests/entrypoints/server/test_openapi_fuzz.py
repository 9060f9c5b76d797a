"""Requests made from the OpenAPI document, right and wrong ones: none may break the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation
from scripted_server import ScriptedServer
from server_process import ServerProcess
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.server.openapi import BODIES
from atom.entrypoints.server_options import ServerOptions

# Random bodies ask for long answers and many of them; a real model would write for hours.
LIMITS = {
    "/v1/completions": {"max_tokens": 4, "n": 2, "best_of": 2},
    "/v1/chat/completions": {"max_tokens": 4, "max_completion_tokens": 4, "n": 2},
    "/v1/responses": {"max_output_tokens": 4},
    "/v1/messages": {"max_tokens": 4},
}


Operation = APIOperation[Any, Any, Any, Any]


@pytest.fixture(scope="module")
def scripted(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    """Everything but the model is real, so that it takes many requests a second."""
    options = ServerOptions(
        tool_call_parser="hermes", reasoning_parser="think_tags", enable_auto_tool_choice=True
    )
    server = ScriptedServer(byte_level_tokenizer, options)
    server.says("<think>Well.</think>Fine.", 3)
    try:
        yield server
    finally:
        server.stop()


def _operations(url: str) -> list[Operation]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    # It takes nothing, and 503 is its answer while the machine is too busy.
    return [operation for operation in operations if operation.path != "/health"]


def _fuzz(operation: Operation, max_examples: int) -> None:
    right, wrong = (
        operation.as_strategy(generation_mode=mode)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    )

    @settings(
        max_examples=max_examples,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(right | wrong)
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            for name, limit in LIMITS.get(operation.path, {}).items():
                if isinstance(case.body.get(name), int):
                    case.body[name] = min(case.body[name], limit)
        answer = case.call()
        assert answer.status_code < 500, answer.text

    check()


def test_the_document_describes_every_body(scripted: ScriptedServer) -> None:
    paths = httpx.get(f"{scripted.url}/openapi.json").json()["paths"]
    posted = {
        path: operations["post"] for path, operations in paths.items() if "post" in operations
    }
    assert posted.keys() == BODIES.keys()
    assert all("requestBody" in operation for operation in posted.values())


def test_few_requests(scripted: ScriptedServer) -> None:
    for operation in _operations(scripted.url):
        _fuzz(operation, 4 if operation.path in BODIES else 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_requests(server: ServerProcess) -> None:
    for operation in _operations(server.url):
        _fuzz(operation, 300 if operation.path in BODIES else 10)
