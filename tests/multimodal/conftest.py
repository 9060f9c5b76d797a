"""An engine for a module's `tower`, and what transformers answers to what it is `given`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from multimodal.image_engine import NEW_TOKENS, Prompt, create, expanded
from multimodal.vision_checkpoints import VisionCheckpoint

from atom import LLM


@pytest.fixture(scope="module")
def engine(tower: VisionCheckpoint) -> Iterator[LLM]:
    with create(tower) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(tower: VisionCheckpoint, engine: LLM, given: dict[str, Prompt]) -> dict[str, list[int]]:
    """Transformers' greedy tokens."""
    return {
        name: tower.greedy(*expanded(engine, prompt), NEW_TOKENS) for name, prompt in given.items()
    }
