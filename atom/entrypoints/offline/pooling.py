"""`LLM`'s calls to a model that embeds or scores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from atom.entrypoints.offline.prompts import Prompt, content_of, prompt_list
from atom.messages import RequestRefusedError
from atom.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from atom.pooling.answers import check_dimensions, cut_vectors, pair_work, scores
from atom.pooling.engine import PoolingEngine


class OfflinePooling:
    """Embeds and scores in the caller's process.

    Args:
        engine: shut down by the caller.
    """

    def __init__(self, engine: PoolingEngine) -> None:
        self.engine = engine
        self._ids = itertools.count()

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        dimensions: int | None,
        prompt_name: str | None,
        truncate: int | None,
        use_activation: bool | None,
    ) -> list[EmbeddingRequestOutput]:
        check_dimensions(self.engine, dimensions)
        contents = [content_of(prompt) for prompt in prompt_list(prompts, None)]
        if not contents:
            return []
        inputs = [
            self.engine.loaded.texts.encode(
                content, f"prompts[{number}]", prompt_name=prompt_name, truncate=truncate
            )
            for number, content in enumerate(contents)
        ]
        rows = self.engine.compute(inputs)
        vectors = cut_vectors(self.engine, rows, dimensions, use_activation).tolist()
        return [
            EmbeddingRequestOutput(
                str(next(self._ids)), EmbeddingOutput(vector), list(each.token_ids)
            )
            for vector, each in zip(vectors, inputs, strict=True)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        instruction: str | None,
        truncate: int | None,
        use_activation: bool,
    ) -> list[ScoringRequestOutput]:
        first, second = (
            [data] if isinstance(data, str) else list(data) for data in (data_1, data_2)
        )
        if not first or not second:
            raise RequestRefusedError("data_1 and data_2 should be texts, one is empty")
        work = pair_work(
            self.engine,
            first,
            second,
            ("data_1", "data_2"),
            instruction=instruction,
            truncate=truncate,
        )
        rows = self.engine.compute(work.inputs)
        found = scores(self.engine, work, rows, use_activation)
        return [
            ScoringRequestOutput(str(next(self._ids)), ScoringOutput(score), tokens)
            for score, tokens in zip(found, work.tokens_of_pairs(), strict=True)
        ]
