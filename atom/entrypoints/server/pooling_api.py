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
from atom.entrypoints.chat.protocol import ApiModel
from atom.entrypoints.http.body import parse_body
from atom.entrypoints.http.errors import SERVER_ERROR, ApiError, bad_request, json_response
from atom.entrypoints.http.unknown_fields import UnknownFields
from atom.entrypoints.pooling.embeddings import embeddings_answer, prepare_embeddings
from atom.entrypoints.pooling.metrics import expose
from atom.entrypoints.pooling.protocol import EmbeddingRequest, RerankRequest, ScoreRequest
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

Body = TypeVar("Body", EmbeddingRequest, ScoreRequest, RerankRequest)
EMBEDDING_ROUTES: dict[str, type[ApiModel]] = {"/v1/embeddings": EmbeddingRequest}
SCORE_ROUTES: dict[str, type[ApiModel]] = {"/v1/score": ScoreRequest, "/score": ScoreRequest}
RERANK_ROUTES: dict[str, type[ApiModel]] = {
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/rerank": RerankRequest,
}
POOLING_BODIES = {**EMBEDDING_ROUTES, **SCORE_ROUTES, **RERANK_ROUTES}
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
        rows = await unless_disconnected(request, self.engine.compute(work.inputs))
        size = sum(len(row) for row in rows)
        return await self.workers.run(
            size, lambda: json_response(spell(body, model, engine, work, rows))
        )

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
