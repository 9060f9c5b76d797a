"""Requests made from the OpenAPI document, right and wrong ones: none may break the server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation
from server_process import ServerProcess

from atom.entrypoints.openai.openapi import BODIES

# Random bodies ask for long answers and many of them; what is fuzzed is the reading of bodies.
LIMITS = {
    "/v1/completions": {"max_tokens": 4, "n": 2, "best_of": 2},
    "/v1/chat/completions": {"max_tokens": 4, "max_completion_tokens": 4, "n": 2},
    "/v1/responses": {"max_output_tokens": 4},
    "/v1/messages": {"max_tokens": 4},
}


@pytest.fixture(scope="module")
def operations(server: ServerProcess) -> list[APIOperation[Any, Any, Any, Any, Any]]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return [result.ok() for result in schema.get_all_operations()]


def _fuzz(operation: APIOperation[Any, Any, Any, Any, Any], max_examples: int) -> None:
    right, wrong = (
        operation.as_strategy(generation_mode=mode)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    )

    @settings(
        max_examples=max_examples,
        deadline=None,
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


def test_the_document_describes_every_body(server: ServerProcess) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    read = {
        path
        for path, operations in document["paths"].items()
        if "requestBody" in operations.get("post", {})
    }
    assert read == set(BODIES) == {path for path, o in document["paths"].items() if "post" in o}


def test_few_requests(operations: list[Any]) -> None:
    for operation in operations:
        _fuzz(operation, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_requests(operations: list[Any]) -> None:
    for operation in operations:
        _fuzz(operation, 300 if operation.path in BODIES else 10)
