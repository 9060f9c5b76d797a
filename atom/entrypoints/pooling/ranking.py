"""`/v1/score` and `/v1/rerank`: how well texts answer others."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from atom.entrypoints.http.errors import ApiError, bad_request
from atom.entrypoints.pooling.embeddings import check_number, usage
from atom.entrypoints.pooling.protocol import RerankRequest, ScoreRequest
from atom.pooling.answers import Work, pair_work, scores
from atom.pooling.engine import PoolingEngine

_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


def prepare_scores(body: ScoreRequest, engine: PoolingEngine) -> Work:
    """Tokenise and validate.

    Raises:
        ApiError, RequestRefusedError: for what cannot be scored as asked.
    """
    given = {name for names in _PAIRS for name in names if getattr(body, name) is not None}
    names = next((names for names in _PAIRS if set(names) == given), None)
    if names is None:
        raise bad_request(
            f"send either {' or '.join(' and '.join(names) for names in _PAIRS)}, not "
            f"{', '.join(sorted(given)) or 'none of them'}",
            "text_1",
            "missing_field",
        )
    first, second = (_texts(getattr(body, name), name) for name in names)
    return pair_work(
        engine,
        first,
        second,
        names,
        instruction=body.instruction,
        truncate=body.truncate_prompt_tokens,
    )


def _texts(value: str | list[str] | None, name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value or []
    check_number(name, len(texts))
    return texts


def scores_answer(
    body: ScoreRequest, model: str, engine: PoolingEngine, work: Work, rows: Sequence[np.ndarray]
) -> dict[str, Any]:
    found = scores(engine, work, rows, body.use_activation is not False)
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [
            {"index": index, "object": "score", "score": score} for index, score in enumerate(found)
        ],
        "usage": usage(work),
    }


def prepare_ranking(body: RerankRequest, engine: PoolingEngine) -> Work:
    """Tokenise and validate.

    Raises:
        ApiError, RequestRefusedError: for what cannot be ranked as asked.
    """
    check_number("documents", len(body.documents))
    if body.top_n is not None and body.top_n < 0:
        raise _not_below_zero("top_n", body.top_n)
    if (most := body.max_tokens_per_doc) is not None and most < 0:
        raise _not_below_zero("max_tokens_per_doc", most)
    texts = document_texts(body)
    if most:
        texts = [engine.loaded.texts.cut(text, most) for text in texts]
    return pair_work(
        engine,
        [body.query],
        texts,
        ("query", "documents"),
        instruction=body.instruction,
        truncate=body.truncate_prompt_tokens,
    )


def _not_below_zero(name: str, value: int) -> ApiError:
    return bad_request(f"{name} must be at least 0, which is no limit; got {value}", name)


def document_texts(body: RerankRequest) -> list[str]:
    return [each if isinstance(each, str) else each.text for each in body.documents]


def ranking_answer(
    body: RerankRequest,
    model: str,
    engine: PoolingEngine,
    work: Work,
    rows: Sequence[np.ndarray],
    *,
    echoes: bool,
) -> dict[str, Any]:
    """Args:
    echoes: whether documents come back where the request does not say.
    """
    found = scores(engine, work, rows, body.use_activation is not False)
    texts = document_texts(body)
    order = sorted(range(len(found)), key=lambda index: -found[index])
    echoes = echoes if body.return_documents is None else body.return_documents
    results = []
    for index in order[: body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": found[index]}
        if echoes:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": model,
        "usage": usage(work),
        "results": results,
    }
