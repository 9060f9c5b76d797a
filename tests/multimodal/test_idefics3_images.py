"""Idefics3 and SmolVLM with images, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from multimodal import vision_checkpoints
from multimodal.image_engine import NEW_TOKENS, Prompt, create, expanded, generate
from multimodal.vision_checkpoints import VisionCheckpoint, normalised, picture
from spec_decode import engines
from transformers import PreTrainedTokenizerFast

from atom import LLM

KINDS = ["idefics3", "smolvlm"]
SIZES = [(60, 45), (16, 16), (1, 1), (7, 100), (300, 20), (33, 200), (48, 48)]


@pytest.fixture(scope="module", params=KINDS)
def small(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> VisionCheckpoint:
    folder = tmp_path_factory.mktemp(request.param)
    return vision_checkpoints.idefics3(folder, byte_level_tokenizer, request.param)


@pytest.fixture(scope="module")
def engine(small: VisionCheckpoint) -> Iterator[LLM]:
    with create(small, max_model_len=120, max_num_batched_tokens=64) as llm:
        yield llm


def prompts(placeholder: int) -> list[Prompt]:
    pad = [placeholder]
    return [
        ([5, 6, *pad, 7, 8], [picture(60, 45)]),
        ([*pad, 9, *pad], [picture(16, 16), picture(90, 10)]),
        ([3, 4, 5, 6, 7, 8], []),
    ]


@pytest.mark.parametrize("splits", [True, False])
def test_tiles_equal_those_of_transformers(
    small: VisionCheckpoint, engine: LLM, splits: bool
) -> None:
    """Before they are normalised to the bit."""
    processor = engine.engine.image_processor
    kind = small.reference.config.model_type
    theirs = vision_checkpoints.idefics3_processor(kind, do_image_splitting=splits)
    raw = vision_checkpoints.idefics3_processor(
        kind, do_image_splitting=splits, do_rescale=False, do_normalize=False
    )
    own = type(processor).of(theirs.to_dict(), small.reference.config, engine.engine.tokenizer)
    for size in SIZES:
        item = own.process(picture(*size))
        expected = theirs(picture(*size), return_tensors="pt").pixel_values[0]
        torch.testing.assert_close(normalised(item.at(0)), expected, atol=1e-6, rtol=1e-6)
        exact = raw(picture(*size), return_tensors="np").pixel_values[0]
        assert np.array_equal(item.pixels, exact)


def test_rows_and_tokens_equal_those_of_transformers(small: VisionCheckpoint, engine: LLM) -> None:
    encoder = engine.engine.core.executor.parts.model.image_encoder
    assert encoder is not None
    for size in SIZES[:3]:
        _, (image,) = expanded(engine, ([small.placeholder], [picture(*size)]))
        pixels = normalised(image)
        with torch.inference_mode():
            ours = encoder(pixels, image.grid)
            (theirs,) = small.reference.model.get_image_features(pixels[None]).pooler_output
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    given = prompts(small.placeholder)
    answers = [small.greedy(*expanded(engine, prompt), NEW_TOKENS) for prompt in given]
    for _ in range(2):
        assert generate(engine, given) == answers


def test_cut_prompts_and_drafts(small: VisionCheckpoint, engine: LLM, tmp_path: Path) -> None:
    given = prompts(small.placeholder)
    expected = generate(engine, given)
    vocab_size = small.reference.config.text_config.vocab_size
    draft = engines.write_draft("mha", tmp_path, vocab_size)
    options = {"max_model_len": 120, "max_num_batched_tokens": 7, "max_num_seqs": 3}
    speculation = {"method": "eagle3", "draft_model": str(draft), "num_speculative_tokens": 2}
    with create(small, **options, **speculation) as llm:
        assert generate(llm, given) == expected
