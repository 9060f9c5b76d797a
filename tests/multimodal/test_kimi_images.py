"""Kimi-K2.5 with images, in the engine, against transformers."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from multimodal import vision_checkpoints
from multimodal.image_engine import Prompt, TowerInEngine, expanded, generate
from multimodal.vision_checkpoints import VisionCheckpoint, picture
from PIL import Image
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.messages import RequestRefusedError
from atom.multimodal.media import MediaLoader
from atom.multimodal.policy import MediaError
from atom.multimodal.processors.kimi_k25 import KimiImageProcessor


@pytest.fixture(scope="module")
def tower(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> VisionCheckpoint:
    return vision_checkpoints.kimi_k25(tmp_path_factory.mktemp("kimi"), byte_level_tokenizer)


def prompts(placeholder: int) -> dict[str, Prompt]:
    pad = [placeholder]
    return {
        "one": ([5, 6, *pad, 7, 8], [picture(60, 45)]),
        "first": ([*pad, 9], [picture(30, 80)]),
        "last": ([9, 10, *pad], [picture(70, 30)]),
        "three between texts": (
            [3, *pad, 4, 5, *pad, *pad, 6, 7],
            [picture(28, 28), picture(90, 40), picture(28, 28, 1)],
        ),
        "none": ([3, 4, 5, 6, 7, 8], []),
        "smallest": ([3, *pad, 4], [picture(1, 1)]),
        "largest": ([3, *pad, 4], [picture(400, 300)]),
    }


@pytest.fixture(scope="module")
def given(tower: VisionCheckpoint) -> dict[str, Prompt]:
    return prompts(tower.placeholder)


@pytest.fixture(params=["mha", "mla", "suffix", "dspark"])
def draft(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestKimiInEngine(TowerInEngine):
    plan = 11, 40


def test_a_programs_images_are_read_side_by_side(
    engine: LLM,
    given: dict[str, Prompt],
    answers: dict[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody reads or processes before all do; they come in their order, and of bad ones the first
    is named. A picture that has not read its file yet may be given twice.
    """
    name = "three between texts"
    tokens, images = given[name]
    files = [tmp_path / f"{i}.png" for i in range(len(images))]
    for image, file in zip(images, files, strict=True):
        image.save(file)
    barrier = threading.Barrier(len(images))

    def met(work: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def meeting(own: Any, source: Any) -> Any:
            barrier.wait(20)
            return work(own, source)

        return meeting

    monkeypatch.setattr(MediaLoader, "load", met(MediaLoader.load))
    monkeypatch.setattr(KimiImageProcessor, "process", met(KimiImageProcessor.process))
    assert generate(engine, [(tokens, files)]) == [answers[name]]
    monkeypatch.undo()
    bad = [files[0], b"first", b"\x89PNG\r\n\x1a\n second"]
    with pytest.raises(MediaError, match="is not an image"):
        generate(engine, [(tokens, bad)])
    lazy = Image.open(files[1])
    assert generate(engine, [(tokens, [lazy] * 3)]) == generate(engine, [(tokens, [images[1]] * 3)])


def test_rows_of_images_equal_those_of_transformers(tower: VisionCheckpoint, engine: LLM) -> None:
    encoder = engine.engine.core.executor.parts.model.image_encoder
    assert encoder is not None
    for size in ((60, 45), (1, 1), (84, 84), (400, 300), (14, 300)):
        _, (image,) = expanded(engine, ([tower.placeholder], [picture(*size)]))
        pixels = vision_checkpoints.normalised(image)
        with torch.inference_mode():
            ours = encoder(pixels, image.grid)
            grid = torch.tensor([[1, *image.grid]])
            (theirs,) = tower.reference.model.get_image_features(pixels, grid).pooler_output
        assert len(ours) == image.num_tokens
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_greedy_tokens_equal_those_of_transformers(
    tower: VisionCheckpoint,
    engine: LLM,
    given: dict[str, Prompt],
    answers: dict[str, list[int]],
) -> None:
    """All in one batch, and once more from the prefix cache."""
    for _ in range(2):
        made = generate(engine, list(given.values()))
        assert dict(zip(given, made, strict=True)) == answers
    one, other = given["one"], ([5, 6, tower.placeholder, 7, 8], [picture(60, 45, 1)])
    assert generate(engine, [one]) != generate(engine, [other])


def test_blocks_behind_an_image_are_shared_with_the_same_one_alone(
    tower: VisionCheckpoint, engine: LLM
) -> None:
    """By whichever way it comes; blocks of 4 tokens before it are shared in any case."""
    assert engine.reset_prefix_cache()
    image, other = picture(84, 56, 10), picture(84, 56, 11)
    encoded = io.BytesIO()
    image.save(encoded, "png")
    text = [11, 12, 13, 14, 15, tower.placeholder, 16, 17, 18, 19, 20]
    sampling = SamplingParams(temperature=0, max_tokens=2)

    def cached(given: object) -> tuple[int, int]:
        prompt = {"prompt_token_ids": text, "multi_modal_data": {"image": given}}
        (output,) = engine.generate(prompt, sampling, use_tqdm=False)
        assert output.num_image_tokens == 6
        return output.num_cached_tokens, engine.engine.core.stats.mm_cache_hits

    hits = engine.engine.core.stats.mm_cache_hits
    assert cached(image) == (0, hits)
    assert cached(other) == (4, hits)
    # All blocks of 16 tokens but the last token's, the image's among them, so nothing is encoded.
    assert cached(encoded.getvalue()) == (12, hits)
    assert engine.reset_prefix_cache()
    assert cached(np.asarray(image)) == (0, hits + 1)


def test_refused_prompts(tower: VisionCheckpoint, engine: LLM) -> None:
    image, pad = picture(30, 30), tower.placeholder
    with pytest.raises(RequestRefusedError, match="1 placeholders of images, and 2 images"):
        generate(engine, [([3, pad], [image, image])])
    with pytest.raises(RequestRefusedError, match="999"):
        generate(engine, [([3, *[pad] * 1000], [image] * 1000)])
    with pytest.raises(TypeError, match="audio"):
        engine.generate({"prompt_token_ids": [3], "multi_modal_data": {"audio": image}})
    with pytest.raises(RequestRefusedError, match="reads no videos"):
        engine.generate({"prompt_token_ids": [3, pad], "multi_modal_data": {"video": [image]}})
