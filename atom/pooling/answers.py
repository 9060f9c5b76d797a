"""What requests ask of a model that embeds or scores: from texts to vectors and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atom.messages import RequestRefusedError, check_text
from atom.pooling.engine import PoolingEngine
from atom.pooling.inputs import PoolingInput, check_content
from atom.quoting import quote


@dataclass(frozen=True)
class Work:
    """Inputs whose rows an answer is made of.

    Attributes:
        num_queries: of the first inputs, where each is embedded and not a pair.
    """

    inputs: list[PoolingInput]
    num_queries: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.inputs)

    def tokens_of_pairs(self) -> list[list[int]]:
        """Those of each pair."""
        if not self.num_queries:
            return [list(each.token_ids) for each in self.inputs]
        queries, documents = self.inputs[: self.num_queries], self.inputs[self.num_queries :]
        if len(queries) == 1:
            queries = queries * len(documents)
        return [
            [*query.token_ids, *document.token_ids]
            for query, document in zip(queries, documents, strict=True)
        ]


def cut_vectors(
    engine: PoolingEngine,
    rows: Sequence[np.ndarray],
    size: int | None = None,
    normalize: bool | None = None,
) -> np.ndarray:
    """Vectors [N, size].

    Args:
        size: numbers to cut them to, if any.
        normalize: whether they get length 1; None for what the checkpoint says.
    """
    embedding = engine.loaded.embedding
    assert embedding is not None
    vectors = np.stack(rows)[:, :size]
    if embedding.is_normalized if normalize is None else normalize:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, 1e-12)
    return np.ascontiguousarray(vectors)


def check_dimensions(engine: PoolingEngine, size: int | None) -> None:
    """Raises:
    RequestRefusedError: for a size that the model's vectors are not cut to, or a model that scores.
    """
    embedding = engine.loaded.embedding
    if embedding is None:
        raise RequestRefusedError(
            f"{engine.description}, and embeds none: POST /v1/score or /v1/rerank", "model"
        )
    if size is not None and not embedding.allows(size):
        raise RequestRefusedError(
            f"dimensions={quote(size)}: the vectors of {engine.model_name} may have "
            f"{embedding.allowed}",
            "dimensions",
        )


def pair_work(
    engine: PoolingEngine,
    queries: Sequence[str],
    documents: Sequence[str],
    names: tuple[str, str],
    *,
    instruction: str | None = None,
    truncate: int | None = None,
) -> Work:
    """The inputs by which pairs are scored: one of each pair, or, where a model embeds, the
    queries and then the documents.

    Args:
        queries: one, or as many as documents.
        names: of the fields of queries and documents, in errors.

    Raises:
        RequestRefusedError: for what the model cannot take.
    """
    if len(queries) not in (1, len(documents)):
        raise RequestRefusedError(
            f"{names[0]} has {len(queries)} texts and {names[1]} {len(documents)}: there should be "
            f"one, or as many as there",
            names[0],
        )
    loaded = engine.loaded
    query_names, document_names = (
        _numbered(name, len(texts)) for name, texts in zip(names, (queries, documents), strict=True)
    )
    if loaded.scoring is None:
        if instruction:
            raise RequestRefusedError(f"{engine.model_name} takes no instruction", "instruction")
        texts = zip([*queries, *documents], [*query_names, *document_names], strict=True)
        embedded = [loaded.texts.encode(text, name, truncate=truncate) for text, name in texts]
        return Work(embedded, len(queries))
    pairs = loaded.scoring.pairs
    if instruction and not pairs.takes_instruction:
        raise RequestRefusedError(f"{engine.model_name} takes no instruction", "instruction")
    for text, name in zip([*queries, *documents], [*query_names, *document_names], strict=True):
        check_content(text, name)
    check_text(instruction or "", "instruction")
    length = loaded.limits.cut_to(truncate)
    shared = len(queries) == 1
    inputs = []
    for number, document in enumerate(documents):
        query = queries[0 if shared else number]
        inputs.append(pairs.encode(query, document, instruction, length))
        loaded.limits.check(inputs[-1].token_ids, document_names[number], length)
    return Work(inputs)


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}[{number}]" for number in range(count)]


def scores(
    engine: PoolingEngine, work: Work, rows: Sequence[np.ndarray], use_activation: bool
) -> list[float]:
    """A score for each pair of `pair_work`: the model's, or the similarity of two vectors.

    Args:
        use_activation: whether the model's answer passes through its activation.
    """
    scoring = engine.loaded.scoring
    if scoring is None:
        vectors = cut_vectors(engine, rows)
        queries, documents = vectors[: work.num_queries], vectors[work.num_queries :]
        products = (queries * documents).sum(1)
        if engine.loaded.embedding is not None and engine.loaded.embedding.similarity == "cosine":
            lengths = np.linalg.norm(queries, axis=1) * np.linalg.norm(documents, axis=1)
            products = products / np.maximum(lengths, 1e-12)
        found: list[float] = products.tolist()
        return found
    logits = np.concatenate(rows).astype(np.float64)
    if use_activation and scoring.activation == "sigmoid":
        logits = 1 / (1 + np.exp(-logits))
    scored: list[float] = logits.tolist()
    return scored
