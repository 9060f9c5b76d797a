"""The HTTP application of a model that embeds or scores."""

from __future__ import annotations

import time

from fastapi import FastAPI

from atom.entrypoints.http.body import MAX_HELD_BYTES, BodyRoom
from atom.entrypoints.http.workers import Workers
from atom.entrypoints.pooling.protocol import EMBEDDING_ROUTES, RERANK_ROUTES, SCORE_ROUTES
from atom.entrypoints.server.app import GENERATION_ROUTES, add_error_handlers, add_middleware
from atom.entrypoints.server.openapi import add_document_route
from atom.entrypoints.server.pooling_api import POOLING_BODIES, PoolingApi
from atom.entrypoints.server_options import MEDIA_OPTIONS, OptionError, ServerOptions
from atom.options.fields import options_of
from atom.pooling.async_engine import AsyncPoolingEngine
from atom.version import __version__

# Options of the server that are of chats and their answers.
_GENERATION_OPTIONS = (
    *("suffix_cache_across_api_keys", "max_tool_grammar", "chat_template"),
    *("sanitize_control_tokens", "tool_call_parser", "reasoning_parser", "tool_strictness"),
    *("enable_auto_tool_choice", "otlp_traces_endpoint", "metrics_per_api_key"),
    *sorted(MEDIA_OPTIONS),
)


def refuse_generation_options(options: ServerOptions, model_name: str) -> None:
    """Raises:
    OptionError: for options that are of chats alone.
    """
    for option in options_of(ServerOptions):
        name = option.field.name
        if name in _GENERATION_OPTIONS and vars(options)[name] != option.default:
            raise OptionError(
                f"{option.flag} is for models that generate, and {model_name} does not; leave it "
                f"out"
            )


def create_pooling_app(engine: AsyncPoolingEngine, options: ServerOptions) -> FastAPI:
    """The application around a started engine."""
    servers = [{"url": options.root_path}] if options.root_path else None
    app = FastAPI(title="ATOM", version=__version__, openapi_url=None, servers=servers)
    api = PoolingApi(
        engine=engine,
        options=options,
        workers=Workers(),
        room=BodyRoom(max(MAX_HELD_BYTES, options.max_body_bytes or 0)),
        model_names=options.served_model_names or (engine.model_name,),
        created=int(time.time()),
    )
    _add_routes(app, api)
    add_error_handlers(app)
    add_middleware(app, options)
    return app


def _add_routes(app: FastAPI, api: PoolingApi) -> None:
    for routes, handler in (
        (EMBEDDING_ROUTES, api.embeddings),
        (SCORE_ROUTES, api.score),
        (RERANK_ROUTES, api.rerank),
    ):
        for path in routes:
            app.add_api_route(path, handler, methods=["POST"])
    for path in GENERATION_ROUTES:
        app.add_api_route(path, api.generates_nothing, methods=["POST"], include_in_schema=False)
    app.add_api_route("/", api.version, include_in_schema=False)
    app.add_api_route("/v1/models", api.models)
    app.add_api_route("/v1/models/{model_id:path}", api.model)
    app.add_api_route("/tokenize", api.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", api.detokenize, methods=["POST"])
    app.add_api_route("/health", api.health)
    app.add_api_route("/metrics", api.prometheus)
    app.add_api_route("/version", api.version)
    add_document_route(app, POOLING_BODIES)
