"""The handlers of the routes of a model that embeds or scores, and of those that it has not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from atom.entrypoints.chat.generation import unless_disconnected
from atom.entrypoints.chat.protocol import ApiModel, DetokenizeRequest
from atom.entrypoints.http.body import parse_body
from atom.entrypoints.http.errors import SERVER_ERROR, ApiError, bad_request, json_response
from atom.entrypoints.http.unknown_fields import UnknownFields
from atom.entrypoints.pooling.embeddings import embeddings_answer, prepare_embeddings
from atom.entrypoints.pooling.metrics import expose
from atom.entrypoints.pooling.protocol import (
    EMBEDDING_ROUTES,
    POOLING_ROUTES,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TextTokenizeRequest,
)
from atom.entrypoints.pooling.ranking import (
    prepare_ranking,
    prepare_scores,
    ranking_answer,
    scores_answer,
)
from atom.entrypoints.server.base import BaseApi
from atom.pooling.answers import Work
from atom.pooling.async_engine import AsyncPoolingEngine
from atom.pooling.engine import PoolingEngine
from atom.quoting import quote

Body = TypeVar("Body", EmbeddingRequest, ScoreRequest, RerankRequest)
POOLING_BODIES: dict[str, type[ApiModel]] = {
    **POOLING_ROUTES,
    "/tokenize": TextTokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
# Cohere's, whose answers do not repeat the documents.
_WITHOUT_DOCUMENTS = "/v2/rerank"


@dataclass(frozen=True, kw_only=True)
class PoolingApi(BaseApi):
    """The handlers, and what they work with."""

    engine: AsyncPoolingEngine

    async def embeddings(self, request: Request) -> Response:
        return await self._answer(request, EmbeddingRequest, prepare_embeddings, embeddings_answer)

    async def score(self, request: Request) -> Response:
        return await self._answer(request, ScoreRequest, prepare_scores, scores_answer)

    async def rerank(self, request: Request) -> Response:
        echoes = not request.url.path.endswith(_WITHOUT_DOCUMENTS)
        answer = functools.partial(ranking_answer, echoes=echoes)
        return await self._answer(request, RerankRequest, prepare_ranking, answer)

    async def _answer(
        self,
        request: Request,
        kind: type[Body],
        prepare: Callable[[Body, PoolingEngine], Work],
        spell: Callable[[Body, str, PoolingEngine, Work, Sequence[np.ndarray]], dict[str, Any]],
    ) -> Response:
        engine = self.engine.engine

        def read(data: bytes, unknown: UnknownFields) -> tuple[Body, str, Work]:
            body = parse_body(data, kind, unknown)
            return body, self._model(body.model), prepare(body, engine)

        body, model, work = await self._prepared(request, read)
        rows = await unless_disconnected(
            request, self.engine.compute(work.inputs, request.state.api_key)
        )
        size = sum(len(row) for row in rows)
        return await self.workers.run(
            size, lambda: json_response(spell(body, model, engine, work, rows))
        )

    async def tokenize(self, request: Request) -> Response:
        loaded = self.engine.engine.loaded

        def answer(data: bytes, unknown: UnknownFields) -> Response:
            body = parse_body(data, TextTokenizeRequest, unknown)
            self._model(body.model)
            tokens = loaded.texts.tokens(body.prompt, body.add_special_tokens is not False)
            spelled = loaded.tokenizer.convert_ids_to_tokens(tokens)
            return json_response(
                {
                    "count": len(tokens),
                    "max_model_len": loaded.limits.max_model_len,
                    "tokens": tokens,
                    "token_strs": spelled if body.return_token_strs else None,
                }
            )

        return await self._prepared(request, answer)

    async def detokenize(self, request: Request) -> Response:
        loaded = self.engine.engine.loaded

        def answer(data: bytes, unknown: UnknownFields) -> Response:
            body = parse_body(data, DetokenizeRequest, unknown)
            self._model(body.model)
            size = loaded.limits.vocab_size
            bad = next((token for token in body.tokens if not 0 <= token < size), None)
            if bad is not None:
                raise bad_request(
                    f"token id {quote(bad)} is outside the vocabulary of {size}", "tokens"
                )
            return json_response({"prompt": loaded.tokenizer.decode(body.tokens)})

        return await self._prepared(request, answer)

    async def generates_nothing(self) -> Response:
        """The answer of the routes of models that generate."""
        routes = EMBEDDING_ROUTES if self.engine.engine.loaded.embedding is not None else {}
        raise bad_request(
            f"{self.engine.engine.description}, and generates none: POST "
            f"{', '.join([*routes, '/v1/score'])} or /v1/rerank",
            "model",
            "wrong_task",
        )

    async def models(self) -> Response:
        cards = [self._pooling_card(name) for name in self.model_names]
        return json_response({"object": "list", "data": cards})

    async def model(self, model_id: str) -> Response:
        return json_response(self._pooling_card(self._model(model_id)))

    async def health(self) -> Response:
        if (trouble := self.engine.trouble) is not None:
            raise ApiError(503, trouble, kind=SERVER_ERROR, code="unhealthy")
        return json_response({"status": "ok"})

    async def prometheus(self) -> Response:
        content, content_type = expose(self.engine.engine)
        return Response(content, media_type=content_type)

    def _pooling_card(self, name: str) -> dict[str, Any]:
        engine = self.engine.engine
        card = {**self._card(name, engine.loaded.limits.max_model_len), "task": engine.task}
        if engine.loaded.embedding is not None:
            card["dimension"] = engine.loaded.embedding.dimension
        return card
