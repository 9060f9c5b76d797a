"""Every error of the server in its API's shape, with the status that says whose fault it is."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from atom.messages import (
    ContextLengthError,
    EngineDeadError,
    RequestFailedError,
    RequestRefusedError,
)
from atom.model_engine.admission import ClientFullError, QueueFullError
from atom.model_engine.async_engine import (
    EngineShuttingDownError,
    EngineStuckError,
    RequestTimeoutError,
)
from atom.quoting import excerpt

logger = logging.getLogger(__name__)

# Of the words of other parts, which may quote what was sent.
MAX_MESSAGE = 500

INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"
CONTEXT_EXCEEDED = "context_length_exceeded"

# Anthropic's `type` of each status; 400 and 500 stand for the others.
ANTHROPIC_KINDS = {
    400: INVALID_REQUEST,
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: RATE_LIMIT,
    500: "api_error",
    504: "timeout_error",
}
ANTHROPIC_PATHS = "/v1/messages"


class ApiError(Exception):
    """An answer other than success.

    Attributes:
        status: HTTP status.
        kind: OpenAI's `type`.
        param: the offending field of the request, where there is one.
        code: a stable word that programs can compare.
        details: what Anthropic's shape says besides.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers
        self.details = details

    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def anthropic_body(self) -> dict[str, Any]:
        kind = ANTHROPIC_KINDS.get(self.status, ANTHROPIC_KINDS[400 if self.status < 500 else 500])
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.details is not None:
            error["details"] = self.details
        return {"type": "error", "error": error}

    def response(self, path: str) -> Response:
        """The answer in the shape of the API that `path` belongs to."""
        is_anthropic = path.startswith(ANTHROPIC_PATHS)
        body = self.anthropic_body() if is_anthropic else self.body()
        return json_response(body, self.status, self.headers)


class ContextExceededError(ApiError):
    """A `ContextLengthError` in the words that clients of each API look for."""

    def __init__(self, error: ContextLengthError, param: str | None) -> None:
        super().__init__(400, str(error), param=param, code=CONTEXT_EXCEEDED)
        self._error = error

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt, or a lower bound where it is too long to be tokenised."""
        return self._error.num_prompt_tokens

    def anthropic_body(self) -> dict[str, Any]:
        body = super().anthropic_body()
        body["error"]["message"] = self._anthropic_message()
        return body

    def _anthropic_message(self) -> str:
        prompt, limit = self._error.num_prompt_tokens, self._error.max_model_len
        max_tokens = self._error.max_tokens
        if max_tokens is None:
            # A prompt as long as the context is too long by the one token that must follow.
            return f"prompt is too long: {prompt} tokens > {min(limit, prompt - 1)} maximum"
        return (
            f"prompt is too long: {prompt + max_tokens} tokens > {limit} maximum with the answer; "
            f"input length and `max_tokens` exceed context limit: {prompt} + {max_tokens} > "
            f"{limit}, decrease input length or `max_tokens` and try again"
        )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def invalid_parameters(error: ValueError, field_names: Mapping[str, str]) -> ApiError:
    """A `SamplingParams` that cannot be built; its messages begin with the field's name.

    `field_names` are the request's own names of fields that are called otherwise there.
    """
    match = re.match(r"[a-z_]+", str(error))
    name = match.group() if match else ""
    return bad_request(excerpt(str(error), MAX_MESSAGE), field_names.get(name, name) or None)


def refused(error: RequestRefusedError, param: str | None) -> ApiError:
    """The answer to what the engine does not take; `param` is the request's name of the field."""
    if isinstance(error, ContextLengthError):
        return ContextExceededError(error, param)
    return bad_request(excerpt(str(error), MAX_MESSAGE), param)


def as_api_error(error: BaseException) -> ApiError:
    """The answer to an exception of the engine; the unforeseen is logged and a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefusedError):
        return refused(error, error.param)
    if isinstance(error, RequestFailedError):
        message = excerpt(str(error), MAX_MESSAGE)
        return ApiError(500, message, kind=SERVER_ERROR, code="request_failed")
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(error.retry_after)}
        code = "key_full" if isinstance(error, ClientFullError) else "queue_full"
        return ApiError(429, str(error), kind=RATE_LIMIT, code=code, headers=headers)
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, str(error), kind=SERVER_ERROR, param="timeout", code="timeout")
    if isinstance(error, EngineDeadError):
        code = "engine_dead"
        if isinstance(error, EngineShuttingDownError):
            code = "shutting_down"
        elif isinstance(error, EngineStuckError):
            code = "unhealthy"
        return ApiError(503, str(error), kind=SERVER_ERROR, code=code)
    logger.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, "internal server error; see the server's log", kind=SERVER_ERROR)


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")
