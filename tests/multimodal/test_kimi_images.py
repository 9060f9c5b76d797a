"""Kimi-K2.5 with images, in the engine, against transformers."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from multimodal import vision_checkpoints
from multimodal.vision_checkpoints import VisionCheckpoint, picture
from PIL import Image
from ranks import engines_of_threads
from spec_decode import engines
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.kv_cache.base import KVCachePlan
from atom.messages import ImageInput, RequestRefusedError
from atom.model_engine.start_up import kv_memory
from atom.multimodal.items import expand
from atom.multimodal.media import MediaLoader
from atom.multimodal.policy import MediaError
from atom.multimodal.processors.kimi_k25 import KimiImageProcessor

NEW_TOKENS = 8
Prompt = tuple[list[int], list[Any]]


@pytest.fixture(scope="module")
def kimi(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> VisionCheckpoint:
    return vision_checkpoints.kimi_k25(tmp_path_factory.mktemp("kimi"), byte_level_tokenizer)


def create(checkpoint: VisionCheckpoint, **overrides: Any) -> LLM:
    options = {
        "dtype": "float32",
        "block_size": 4,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "max_model_len": 160,
        "kv_cache_memory": "8MB",
        "num_threads": 1,
        **overrides,
    }
    return LLM(str(checkpoint.folder), **options)


@pytest.fixture(scope="module")
def engine(kimi: VisionCheckpoint) -> Iterator[LLM]:
    with create(kimi) as llm:
        yield llm


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


def expanded(llm: LLM, prompt: Prompt) -> tuple[list[int], tuple[ImageInput, ...]]:
    processor = llm.engine.image_processor
    assert processor is not None
    items = [processor.process(image) for image in prompt[1]]
    return expand(prompt[0], items, processor.placeholder_id)


def generate(llm: LLM, given: list[Prompt], **params: Any) -> list[list[int]]:
    """The first output of each."""
    return [outputs[0] for outputs in generate_all(llm, given, **params)]


def generate_all(llm: LLM, given: list[Prompt], **params: Any) -> list[list[list[int]]]:
    sampling = SamplingParams(
        **{"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **params}
    )
    asked = [
        {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}
        for tokens, images in given
    ]
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    llm.engine.core.block_pool.check_integrity()
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def answers(kimi: VisionCheckpoint, engine: LLM) -> dict[str, list[int]]:
    """Transformers' greedy tokens."""
    return {
        name: kimi.greedy(*expanded(engine, prompt), NEW_TOKENS)
        for name, prompt in prompts(kimi.placeholder).items()
    }


def test_a_programs_images_are_read_side_by_side(
    kimi: VisionCheckpoint,
    engine: LLM,
    answers: dict[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody reads or processes before all do; they come in their order, and of bad ones the first
    is named. A picture that has not read its file yet may be given twice.
    """
    name = "three between texts"
    tokens, images = prompts(kimi.placeholder)[name]
    files = [tmp_path / f"{i}.png" for i in range(len(images))]
    for image, file in zip(images, files, strict=True):
        image.save(file)
    barrier = threading.Barrier(len(images))

    def met(work: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def meeting(own: Any, given: Any) -> Any:
            barrier.wait(20)
            return work(own, given)

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


def test_rows_of_images_equal_those_of_transformers(kimi: VisionCheckpoint, engine: LLM) -> None:
    encoder = engine.engine.core.executor.parts.model.image_encoder
    assert encoder is not None
    for size in ((60, 45), (1, 1), (84, 84), (400, 300), (14, 300)):
        _, (image,) = expanded(engine, ([kimi.placeholder], [picture(*size)]))
        pixels = vision_checkpoints.normalised(image)
        with torch.inference_mode():
            ours = encoder(pixels, image.grid)
            grid = torch.tensor([[1, *image.grid]])
            (theirs,) = kimi.reference.model.get_image_features(pixels, grid).pooler_output
        assert len(ours) == image.num_tokens
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_greedy_tokens_equal_those_of_transformers(
    kimi: VisionCheckpoint, engine: LLM, answers: dict[str, list[int]]
) -> None:
    """All in one batch, and once more from the prefix cache."""
    given = prompts(kimi.placeholder)
    for _ in range(2):
        made = generate(engine, list(given.values()))
        assert dict(zip(given, made, strict=True)) == answers
    one, other = given["one"], ([5, 6, kimi.placeholder, 7, 8], [picture(60, 45, 1)])
    assert generate(engine, [one]) != generate(engine, [other])


@pytest.mark.parametrize("most", [1, 2, 5])
def test_prompts_are_cut_anywhere(
    kimi: VisionCheckpoint, answers: dict[str, list[int]], most: int
) -> None:
    """Also where nothing of an image is kept from one step to the next."""
    options = {"max_num_batched_tokens": most, "max_num_seqs": 1}
    kept = {"mm_cache_memory": 0} if most == 2 else {}
    given = prompts(kimi.placeholder)
    names = ["three between texts", "last"]
    with create(kimi, **options, **kept, enable_prefix_caching=False) as llm:
        assert generate(llm, [given[name] for name in names]) == [answers[name] for name in names]
        stats = llm.engine.core.stats
        assert (stats.mm_cache_queries, stats.mm_cache_hits) == (4, 0)
        assert stats.num_replayed_decode_steps > 0


def test_preempted_sequences(
    kimi: VisionCheckpoint, answers: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(11, 0))
    given = prompts(kimi.placeholder)
    names = ["one", "last", "three between texts", "none"]
    with create(kimi, max_model_len=40, enable_prefix_caching=False) as llm:
        assert generate(llm, [given[name] for name in names]) == [answers[name] for name in names]
        assert llm.engine.core.stats.num_preemptions > 0


def test_blocks_behind_an_image_are_shared_with_the_same_one_alone(
    kimi: VisionCheckpoint, engine: LLM
) -> None:
    """By whichever way it comes; blocks of 4 tokens before it are shared in any case."""
    assert engine.reset_prefix_cache()
    image, other = picture(84, 56, 10), picture(84, 56, 11)
    encoded = io.BytesIO()
    image.save(encoded, "png")
    text = [11, 12, 13, 14, 15, kimi.placeholder, 16, 17, 18, 19, 20]
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


DRAFTS = ["mha", "mla", "suffix", "dspark"]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_change_no_token(
    kimi: VisionCheckpoint,
    answers: dict[str, list[int]],
    draft: str,
    overlap: bool,
    tmp_path: Path,
) -> None:
    speculation: dict[str, Any] = {"num_speculative_tokens": 3, "method": "suffix"}
    if draft != "suffix":
        speculation["method"] = engines.method_of(draft)
        vocab_size = kimi.reference.config.text_config.vocab_size
        speculation["draft_model"] = str(engines.write_draft(draft, tmp_path, vocab_size))
    given = prompts(kimi.placeholder)
    options = {"max_num_batched_tokens": 12, "max_num_seqs": 8, "overlap": overlap}
    with create(kimi, **options, **speculation) as llm:
        for _ in range(2):
            assert generate(llm, list(given.values())) == list(answers.values())


def test_two_ranks(kimi: VisionCheckpoint, answers: dict[str, list[int]]) -> None:
    given = prompts(kimi.placeholder)
    with engines_of_threads(), create(kimi, tensor_parallel_size=2) as llm:
        assert generate(llm, list(given.values())) == list(answers.values())


def test_without_a_tower(kimi: VisionCheckpoint, answers: dict[str, list[int]]) -> None:
    given = prompts(kimi.placeholder)
    with create(kimi, limit_mm_per_prompt={"image": 0}) as llm:
        names = [name for name, _ in llm.engine.core.executor.parts.model.named_parameters()]
        assert not any("vision" in name for name in names)
        assert generate(llm, [given["none"]]) == [answers["none"]]
        with pytest.raises(RequestRefusedError, match="loaded to read none"):
            generate(llm, [given["one"]])


def test_refused_prompts(kimi: VisionCheckpoint, engine: LLM) -> None:
    image, pad = picture(30, 30), kimi.placeholder
    with pytest.raises(RequestRefusedError, match="1 placeholders of images, and 2 images"):
        generate(engine, [([3, pad], [image, image])])
    with pytest.raises(RequestRefusedError, match="999"):
        generate(engine, [([3, *[pad] * 1000], [image] * 1000)])
    with pytest.raises(TypeError, match="audio"):
        engine.generate({"prompt_token_ids": [3], "multi_modal_data": {"audio": image}})
    with pytest.raises(RequestRefusedError, match="reads no videos"):
        engine.generate({"prompt_token_ids": [3, pad], "multi_modal_data": {"video": [image]}})
