"""The HTTP application: routes, and errors in their API's shape."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from atom.entrypoints.chat.detection import with_found_parsers
from atom.entrypoints.chat.images import IMAGE_THREADS, ImageReader
from atom.entrypoints.chat.template import ChatTemplates
from atom.entrypoints.chat.tokenization import PromptEncoder
from atom.entrypoints.http.auth import ApiKeyMiddleware
from atom.entrypoints.http.body import MAX_HELD_BYTES, BodyRoom
from atom.entrypoints.http.edge import EXPOSED_HEADERS, REQUEST_ID_HEADER, EdgeMiddleware
from atom.entrypoints.http.errors import (
    INVALID_REQUEST,
    SERVER_ERROR,
    ApiError,
    as_api_error,
)
from atom.entrypoints.http.metrics import ServerMetrics
from atom.entrypoints.http.playground import add_playground
from atom.entrypoints.http.root_path import RootPathMiddleware
from atom.entrypoints.http.workers import Workers
from atom.entrypoints.parsing.tool_parsers import GENERIC
from atom.entrypoints.pooling.protocol import POOLING_ROUTES
from atom.entrypoints.server.api import Api
from atom.entrypoints.server.openapi import add_document_route
from atom.entrypoints.server_options import OptionError, ServerOptions
from atom.messages import EngineDeadError, RequestFailedError, RequestRefusedError
from atom.model_engine.admission import QueueFullError
from atom.model_engine.async_engine import AsyncEngine, RequestTimeoutError
from atom.multimodal.media import MediaLoader
from atom.multimodal.policy import MediaError
from atom.quoting import excerpt
from atom.version import __version__

# nginx's status for a client that has gone; nobody reads it.
CLIENT_CLOSED_REQUEST = 499


GENERATION_ROUTES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/messages/count_tokens", "/generate"),
)


def create_app(engine: AsyncEngine, options: ServerOptions, metrics: ServerMetrics) -> FastAPI:
    """The application around a started engine.

    Raises:
        OptionError: when the chat template of `options` is not one.
    """
    template = ChatTemplates(engine.tokenizer, options.chat_template).default
    options = with_found_parsers(options, template, engine.model_type)
    servers = [{"url": options.root_path}] if options.root_path else None
    app = FastAPI(title="ATOM", version=__version__, openapi_url=None, servers=servers)
    _add_routes(app, _create_api(engine, options, metrics), has_ui=options.ui)
    add_error_handlers(app)
    add_middleware(app, options)
    return app


def _create_api(engine: AsyncEngine, options: ServerOptions, metrics: ServerMetrics) -> Api:
    return Api(
        engine=engine,
        options=options,
        encoder=PromptEncoder(
            engine.tokenizer,
            engine.limits.max_model_len,
            options.chat_template,
            tool_format=options.tool_format or GENERIC,
            sanitize_control_tokens=options.sanitize_control_tokens,
            images=_create_image_reader(engine, options),
        ),
        workers=Workers(),
        image_workers=Workers(IMAGE_THREADS),
        room=BodyRoom(max(MAX_HELD_BYTES, options.max_body_bytes or 0)),
        vocabulary=engine.vocabulary,
        metrics=metrics,
        model_names=options.served_model_names or (engine.model_name,),
        created=int(time.time()),
    )


def _create_image_reader(engine: AsyncEngine, options: ServerOptions) -> ImageReader | None:
    """None where the model reads no images.

    Raises:
        OptionError: when the options of images go with a model that reads none, or need what is
            not installed.
    """
    if engine.image_processor is None:
        if given := options.media_flags:
            raise OptionError(f"{given[0]}: {engine.model_name} reads no images; leave it out")
        return None
    try:
        loader = MediaLoader(options.media_policy)
    except MediaError as error:
        raise OptionError(f"{engine.model_name} reads images: {error}") from None
    model = engine.config.model
    return ImageReader(
        engine.image_processor,
        loader,
        model.max_images,
        engine.limits.max_model_len,
        engine.video_processor,
        model.max_videos,
    )


def _add_routes(app: FastAPI, api: Api, *, has_ui: bool) -> None:
    if has_ui:
        add_playground(app)
    else:
        app.add_api_route("/", api.version, include_in_schema=False)
    app.add_api_route("/v1/completions", api.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", api.chat_completions, methods=["POST"])
    app.add_api_route("/v1/responses", api.responses, methods=["POST"])
    app.add_api_route("/v1/messages", api.messages, methods=["POST"])
    app.add_api_route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"])
    for path in POOLING_ROUTES:
        app.add_api_route(path, api.embeds_nothing, methods=["POST"], include_in_schema=False)
    app.add_api_route("/v1/models", api.models)
    app.add_api_route("/v1/models/{model_id:path}", api.model)
    app.add_api_route("/generate", api.generate, methods=["POST"])
    app.add_api_route("/tokenizer_info", api.tokenizer_info)
    app.add_api_route("/tokenize", api.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", api.detokenize, methods=["POST"])
    app.add_api_route("/health", api.health)
    app.add_api_route("/metrics", api.prometheus)
    app.add_api_route("/version", api.version)
    add_document_route(app)


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unforeseen)
    for error in (
        ApiError,
        RequestRefusedError,
        RequestFailedError,
        QueueFullError,
        RequestTimeoutError,
        EngineDeadError,
    ):
        app.add_exception_handler(error, _on_exception)


def add_middleware(app: FastAPI, options: ServerOptions) -> None:
    """The last one added is the outermost: preflight requests carry no key."""
    if options.api_keys:
        app.add_middleware(ApiKeyMiddleware, api_keys=options.named_api_keys)
    if options.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_allow_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(EdgeMiddleware, logs_requests=options.enable_log_requests)
    if options.root_path:
        app.add_middleware(RootPathMiddleware, root_path=options.root_path)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    return ApiError(
        error.status_code,
        f"{request.method} {excerpt(request.url.path)}: {error.detail}",
        kind=INVALID_REQUEST if error.status_code < 500 else SERVER_ERROR,
        code=codes.get(error.status_code),
        headers=error.headers,
    ).response(request.url.path)


async def _on_exception(request: Request, error: Exception) -> Response:
    return as_api_error(error).response(request.url.path)


async def _on_unforeseen(request: Request, error: Exception) -> Response:
    """Beyond all middleware, so it says itself which request it answers. The server closes the
    connection behind it, of which the client should know.
    """
    response = await _on_exception(request, error)
    response.headers["Connection"] = "close"
    response.headers[REQUEST_ID_HEADER] = request.state.request_id
    return response
