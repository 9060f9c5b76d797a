"""The OpenAPI document: the routes, with the bodies that they read themselves."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from atom.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from atom.entrypoints.chat.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from atom.entrypoints.openai.responses.protocol import ResponsesRequest
from atom.entrypoints.sglang.protocol import GenerateRequest

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}

REFERENCE = "#/components/schemas/{model}"

# Routes read and check bodies themselves, so FastAPI knows neither them nor these answers.
ANSWERS = {
    "400": "The request cannot be honoured.",
    "401": "No valid API key.",
    "404": "No such model.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "Too many requests wait.",
    "503": "The engine does not answer, or the server stops.",
}


def add_document_route(app: FastAPI, bodies: Mapping[str, type[BaseModel]] = BODIES) -> None:
    """Serve the document as `/openapi.json`; it is made when it is first asked for.

    Args:
        bodies: by route.
    """

    @functools.cache
    def encoded() -> bytes:
        return msgspec.json.encode(create_document(app, bodies))

    async def openapi() -> Response:
        return Response(encoded(), media_type="application/json")

    app.add_api_route("/openapi.json", openapi, include_in_schema=False)


def create_document(app: FastAPI, bodies: Mapping[str, type[BaseModel]] = BODIES) -> dict[str, Any]:
    """The document of `app`'s routes."""
    document = app.openapi()
    schemas, definitions = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(bodies.values())],
        ref_template=REFERENCE,
    )
    document["components"] = {"schemas": definitions["$defs"]}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            answers.pop("422", None)
            answers |= {status: {"description": said} for status, said in ANSWERS.items()}
            if path in bodies:
                schema = schemas[bodies[path], "validation"]
                content = {"application/json": {"schema": schema}}
                operation["requestBody"] = {"required": True, "content": content}
    return document
