"""`/v1/embeddings`: texts or tokens in four shapes, and vectors in two."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from atom.entrypoints.http.errors import bad_request
from atom.entrypoints.pooling.protocol import EmbeddingRequest
from atom.messages import RequestRefusedError
from atom.pooling.answers import Work, check_dimensions, cut_vectors
from atom.pooling.engine import PoolingEngine

# Of a request.
MAX_INPUTS = 2048


def parse_inputs(value: Any) -> list[str | list[int]]:
    """A string, strings, token ids or lists of token ids, as a list of inputs.

    Raises:
        ApiError: 400 for anything else, and for too many.
    """
    inputs: list[Any] | None = None
    if isinstance(value, str):
        inputs = [value]
    elif isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            inputs = [value]
        elif all(type(item) is str or _is_token_ids(item) for item in value):
            inputs = value
    if inputs is None:
        raise bad_request(
            "input must be a string, a list of strings, a list of token ids or a list of lists of "
            "token ids, and not be empty",
            "input",
            "invalid_type",
        )
    check_number("input", len(inputs))
    return inputs


def check_number(name: str, count: int) -> None:
    """Raises:
    ApiError: 400 when a field has too many texts, or none.
    """
    if count == 0:
        raise bad_request(f"{name} is empty", name)
    if count > MAX_INPUTS:
        raise bad_request(
            f"{name} has {count} items; at most {MAX_INPUTS} are taken, send several requests", name
        )


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def prepare_embeddings(body: EmbeddingRequest, engine: PoolingEngine) -> Work:
    """Tokenise and validate.

    Raises:
        ApiError, RequestRefusedError: for what cannot be embedded as asked.
    """
    inputs = parse_inputs(body.input)
    check_dimensions(engine, body.dimensions)
    _normalizes(body)
    return Work(
        [
            engine.loaded.texts.encode(
                content,
                "input" if len(inputs) == 1 else f"input[{number}]",
                prompt_name=body.prompt_name,
                truncate=body.truncate_prompt_tokens,
                add_special_tokens=body.add_special_tokens is not False,
            )
            for number, content in enumerate(inputs)
        ]
    )


def _normalizes(body: EmbeddingRequest) -> bool | None:
    """Raises:
    RequestRefusedError: when the two names of this contradict each other.
    """
    given = {body.use_activation, body.normalize} - {None}
    if len(given) > 1:
        raise RequestRefusedError(
            "normalize contradicts use_activation, its newer name", "normalize"
        )
    return given.pop() if given else None


def embeddings_answer(
    body: EmbeddingRequest,
    model: str,
    engine: PoolingEngine,
    work: Work,
    rows: Sequence[np.ndarray],
) -> dict[str, Any]:
    vectors = cut_vectors(engine, rows, body.dimensions, _normalizes(body))
    spelled: list[Any] = (
        [base64.b64encode(vector).decode("ascii") for vector in vectors.astype("<f4")]
        if body.encoding_format == "base64"
        else vectors.tolist()
    )
    data = [
        {"object": "embedding", "index": index, "embedding": embedding}
        for index, embedding in enumerate(spelled)
    ]
    return {"object": "list", "data": data, "model": model, "usage": usage(work)}


def usage(work: Work) -> dict[str, int]:
    return {"prompt_tokens": work.num_tokens, "total_tokens": work.num_tokens}
