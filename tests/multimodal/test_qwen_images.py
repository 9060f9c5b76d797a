"""Qwen2.5-VL and Qwen3-VL with images, in the engine, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from multimodal import vision_checkpoints
from multimodal.test_kimi_images import NEW_TOKENS, Prompt, create, expanded, generate
from multimodal.vision_checkpoints import QWEN_SETTINGS, QwenCheckpoint, picture, qwen_patches
from ranks import engines_of_threads
from spec_decode import engines
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from atom import LLM, SamplingParams
from atom.kv_cache.base import KVCachePlan
from atom.messages import RequestRefusedError
from atom.model_engine.start_up import kv_memory
from atom.model_engine.step.step_images import shifts_at
from atom.model_ops.rotary import axes_of_pairs
from atom.multimodal.policy import MediaError
from atom.multimodal.processors.qwen_vl import QwenImageProcessor, fitting

KINDS = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"]


@pytest.fixture(scope="module", params=KINDS)
def qwen(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> QwenCheckpoint:
    folder = tmp_path_factory.mktemp(request.param)
    return vision_checkpoints.qwen_vl(folder, byte_level_tokenizer, request.param)


@pytest.fixture(scope="module")
def engine(qwen: QwenCheckpoint) -> Iterator[LLM]:
    with create(qwen) as llm:
        yield llm


def prompts(placeholder: int) -> dict[str, Prompt]:
    pad = [placeholder]
    return {
        "one": ([5, 6, *pad, 7, 8], [picture(40, 24)]),
        "first": ([*pad, 9], [picture(16, 64)]),
        "last": ([9, 10, *pad], [picture(70, 10)]),
        "three between texts": (
            [3, *pad, 4, 5, *pad, 10, *pad, 6, 7],
            [picture(16, 16), picture(56, 16), picture(16, 16, 1)],
        ),
        "none": ([3, 4, 5, 6, 7, 8], []),
        "smallest": ([3, *pad, 4], [picture(1, 1)]),
        "largest": ([3, *pad, 4], [picture(400, 300)]),
    }


@pytest.fixture(scope="module")
def answers(qwen: QwenCheckpoint, engine: LLM) -> dict[str, list[int]]:
    """Transformers' greedy tokens."""
    return {
        name: qwen.greedy(*expanded(engine, prompt), NEW_TOKENS)
        for name, prompt in prompts(qwen.placeholder).items()
    }


def test_sizes_equal_those_of_transformers() -> None:
    for step, least, most in ((28, 3136, 12845056), (32, 65536, 16777216), (8, 256, 1024)):
        for width in (1, 7, 14, 42, 70, 99, 500, 1000, 3333):
            for height in (1, 13, 28, 56, 98, 640, 4000):
                if max(width, height) / min(width, height) > 200:
                    with pytest.raises(MediaError, match=f"{width} by {height} pixels"):
                        fitting(width, height, step, least, most)
                    continue
                expected = smart_resize(height, width, step, least, most)
                assert fitting(width, height, step, least, most) == expected[::-1]


def test_patches_equal_those_of_transformers(engine: LLM) -> None:
    """Before they are normalised to the bit."""
    processor = engine.engine.image_processor
    assert isinstance(processor, QwenImageProcessor)
    theirs = Qwen2VLImageProcessorPil(**QWEN_SETTINGS)
    raw = Qwen2VLImageProcessorPil(**QWEN_SETTINGS, do_rescale=False, do_normalize=False)
    for size in ((60, 45), (8, 8), (1, 1), (7, 100), (300, 20), (33, 200), (100, 1)):
        item = processor.process(picture(*size))
        given = theirs(picture(*size), return_tensors="pt")
        torch.testing.assert_close(
            qwen_patches(item.at(0)), given.pixel_values, atol=1e-6, rtol=1e-6
        )
        assert [list(item.grid)] == given.image_grid_thw.tolist()
        exact = raw(picture(*size), return_tensors="np").pixel_values
        own = np.repeat(item.pixels.transpose(0, 2, 1, 3, 4), 2, axis=2)
        assert np.array_equal(own.reshape(len(exact), -1), exact)


def test_rows_of_images_equal_those_of_transformers(qwen: QwenCheckpoint, engine: LLM) -> None:
    encoder = engine.engine.core.executor.parts.model.image_encoder
    assert encoder is not None
    for size in ((60, 45), (1, 1), (24, 24), (400, 300), (8, 100)):
        _, (image,) = expanded(engine, ([qwen.placeholder], [picture(*size)]))
        pixels, grid = vision_checkpoints.normalised(image), torch.tensor([image.grid])
        with torch.inference_mode():
            ours = encoder(pixels, image.grid)
            theirs = qwen.reference.model.get_image_features(qwen_patches(image), grid)
        deep = [rows for (rows,) in getattr(theirs, "deepstack_features", None) or ()]
        expected = torch.cat([*theirs.pooler_output, *deep], dim=1)
        assert len(ours) == image.num_tokens
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_places_equal_those_of_transformers(qwen: QwenCheckpoint, engine: LLM) -> None:
    """Of whole prompts, of pieces, and behind them."""
    for prompt in prompts(qwen.placeholder).values():
        tokens, images = expanded(engine, prompt)
        tokens = [*tokens, 5, 6, 7]
        expected = torch.arange(len(tokens))[:, None].expand(-1, 3)
        if images:
            expected = qwen.positions(tokens, images)
        whole = np.arange(len(tokens))[:, None] + shifts_at(images, 0, len(tokens))
        assert whole.tolist() == expected.tolist()
        for cut in range(len(tokens) + 1):
            pieces = [shifts_at(images, 0, cut), shifts_at(images, cut, len(tokens))]
            assert np.array_equal(np.concatenate(pieces), shifts_at(images, 0, len(tokens)))


def test_logprobs_equal_those_of_transformers(qwen: QwenCheckpoint, engine: LLM) -> None:
    """Of all tokens behind the first, in one piece and in pieces of 5."""
    given = prompts(qwen.placeholder)["three between texts"]
    tokens, images = expanded(engine, given)
    expected = qwen.logits(tokens, images).log_softmax(-1)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with create(qwen, max_num_batched_tokens=5, max_num_seqs=1) as small:
        for llm in (engine, small):
            asked = {"prompt_token_ids": given[0], "multi_modal_data": {"image": given[1]}}
            (output,) = llm.generate(asked, sampling, use_tqdm=False)
            assert output.prompt_logprobs is not None
            for place, known in enumerate(output.prompt_logprobs[1:], 1):
                assert known is not None
                value = known[tokens[place]].logprob
                assert value == pytest.approx(float(expected[place - 1, tokens[place]]), abs=1e-4)


def test_greedy_tokens_equal_those_of_transformers(
    qwen: QwenCheckpoint, engine: LLM, answers: dict[str, list[int]]
) -> None:
    """All in one batch, and once more from the prefix cache; the second time tokens are replayed
    from programs of the first.
    """
    given = prompts(qwen.placeholder)
    for _ in range(2):
        made = generate(engine, list(given.values()))
        assert dict(zip(given, made, strict=True)) == answers
    assert engine.engine.core.stats.num_replayed_decode_steps > 0
    # As many tokens of as many pixels, otherwise placed.
    wide, tall = (([5, 6, qwen.placeholder, 7, 8], [picture(*s)]) for s in ((64, 16), (16, 64)))
    (tokens, (first,)), (_, (second,)) = expanded(engine, wide), expanded(engine, tall)
    assert first.num_tokens == second.num_tokens
    assert generate(engine, [wide, tall]) == [
        qwen.greedy(tokens, [first], NEW_TOKENS),
        qwen.greedy(tokens, [second], NEW_TOKENS),
    ]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_prompts_are_cut_anywhere(
    qwen: QwenCheckpoint, answers: dict[str, list[int]], most: int
) -> None:
    """Also where nothing of an image is kept from one step to the next."""
    options = {"max_num_batched_tokens": most, "max_num_seqs": 1}
    kept = {"mm_cache_memory": 0} if most == 2 else {}
    given = prompts(qwen.placeholder)
    names = ["three between texts", "last"]
    with create(qwen, **options, **kept, enable_prefix_caching=False) as llm:
        assert generate(llm, [given[name] for name in names]) == [answers[name] for name in names]


def test_preempted_sequences(
    qwen: QwenCheckpoint, answers: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(12, 0))
    given = prompts(qwen.placeholder)
    names = ["one", "last", "three between texts", "none"]
    with create(qwen, max_model_len=48, enable_prefix_caching=False) as llm:
        assert generate(llm, [given[name] for name in names]) == [answers[name] for name in names]
        assert llm.engine.core.stats.num_preemptions > 0


@pytest.mark.parametrize("draft", ["mha", "suffix"])
@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_change_no_token(
    qwen: QwenCheckpoint,
    answers: dict[str, list[int]],
    draft: str,
    overlap: bool,
    tmp_path: Path,
) -> None:
    """Drafts rotate by positions alone."""
    speculation: dict[str, Any] = {"num_speculative_tokens": 3, "method": "suffix"}
    if draft != "suffix":
        speculation["method"] = engines.method_of(draft)
        vocab_size = qwen.reference.config.text_config.vocab_size
        speculation["draft_model"] = str(engines.write_draft(draft, tmp_path, vocab_size))
    given = prompts(qwen.placeholder)
    options = {"max_num_batched_tokens": 12, "max_num_seqs": 8, "overlap": overlap}
    with create(qwen, **options, **speculation) as llm:
        for _ in range(2):
            assert generate(llm, list(given.values())) == list(answers.values())
        several = generate(llm, [given["one"]], n=2)
        assert several == [answers["one"]]


def test_two_ranks(qwen: QwenCheckpoint, answers: dict[str, list[int]]) -> None:
    given = prompts(qwen.placeholder)
    with engines_of_threads(), create(qwen, tensor_parallel_size=2) as llm:
        assert generate(llm, list(given.values())) == list(answers.values())


def test_without_a_tower(qwen: QwenCheckpoint, answers: dict[str, list[int]]) -> None:
    given = prompts(qwen.placeholder)
    with create(qwen, limit_mm_per_prompt={"image": 0}) as llm:
        names = [name for name, _ in llm.engine.core.executor.parts.model.named_parameters()]
        assert not any(name.startswith("vis") for name in names)
        assert generate(llm, [given["none"]]) == [answers["none"]]
        with pytest.raises(RequestRefusedError, match="loaded to read none"):
            generate(llm, [given["one"]])


def test_published_names(
    qwen: QwenCheckpoint, answers: dict[str, list[int]], tmp_path: Path
) -> None:
    """Those of others are transformers' own."""
    write = vision_checkpoints.AS_PUBLISHED.get(qwen.reference.config.model_type)
    if write is None:
        pytest.skip("the same")
    given = prompts(qwen.placeholder)
    with create(write(qwen, tmp_path)) as llm:
        assert generate(llm, list(given.values())) == list(answers.values())


def test_which_pairs_turn_by_what() -> None:
    assert axes_of_pairs([2, 1, 1], 4, mixed=False).tolist() == [0, 0, 1, 2]
    assert axes_of_pairs([3, 2, 1], 6, mixed=True).tolist() == [0, 1, 2, 0, 1, 0]
    for sections in ([2, 2], [2, 2, 1], [1, 2, 1]):
        with pytest.raises(ValueError, match="mrope_section"):
            axes_of_pairs(sections, 4, mixed=True)
