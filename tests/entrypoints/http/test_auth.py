"""Who needs a key, and which keys are taken."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from atom.entrypoints.http.auth import ApiKeyMiddleware, is_open
from atom.entrypoints.http.playground import PREFIX
from atom.entrypoints.server_options import ApiKey


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = Starlette(routes=[Route("/{path:path}", lambda _: PlainTextResponse("in"))])
    return TestClient(ApiKeyMiddleware(app, [ApiKey("a", "first"), ApiKey("b", "sécond")]))


@pytest.mark.parametrize("path", ["/", "/health", PREFIX, f"{PREFIX}/app.js"])
def test_open_paths(client: TestClient, path: str) -> None:
    assert is_open(path)
    assert client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/healthy", "/health/x", "//", "/metrics"])
def test_other_paths_need_a_key(client: TestClient, path: str) -> None:
    assert not is_open(path)
    refused = client.get(f"http://testserver{path}")
    assert refused.status_code == 401
    assert refused.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer first"}, 200),
        ({"Authorization": "bearer first"}, 200),
        ({"x-api-key": "first"}, 200),
        ({"x-api-key": "wrong", "Authorization": "Bearer first"}, 200),
        ({"Authorization": "Basic first"}, 401),
        ({"Authorization": "first"}, 401),
        ({"Authorization": "Bearer firs"}, 401),
        ({"Authorization": "Bearer firstly"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ],
    ids=str,
)
def test_keys(client: TestClient, headers: dict[str, str], status: int) -> None:
    assert client.get("/v1/models", headers=headers).status_code == status
