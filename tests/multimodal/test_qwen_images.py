"""Qwen2.5-VL and Qwen3-VL with images, in the engine, against transformers."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from multimodal import vision_checkpoints
from multimodal.image_engine import (
    NEW_TOKENS,
    Prompt,
    TowerInEngine,
    create,
    expanded,
    generate,
)
from multimodal.vision_checkpoints import (
    QWEN_SETTINGS,
    QwenCheckpoint,
    film,
    picture,
    qwen_patches,
)
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from atom import LLM, SamplingParams
from atom.entrypoints.chat.images import ImageReader
from atom.entrypoints.chat.prompt import Prompt as ServerPrompt
from atom.entrypoints.chat.template import ChatTemplates
from atom.entrypoints.offline.prompts import images_of, marked_images
from atom.messages import ImageInput, RequestRefusedError
from atom.model_engine.block_pool import BlockHash
from atom.model_engine.replicas.router import Router
from atom.model_engine.step.step_images import shifts_at
from atom.model_ops.rotary import axes_of_pairs
from atom.multimodal.items import Video, expand
from atom.multimodal.media import MediaLoader, VideoSource
from atom.multimodal.policy import MediaError, MediaPolicy
from atom.multimodal.processors import qwen_vl
from atom.multimodal.processors.qwen_vl import (
    QwenImageProcessor,
    QwenVideoProcessor,
    fitting,
    fitting_frames,
)

KINDS = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"]


@pytest.fixture(scope="module", params=KINDS)
def tower(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> QwenCheckpoint:
    folder = tmp_path_factory.mktemp(request.param)
    return vision_checkpoints.qwen_vl(folder, byte_level_tokenizer, request.param)


@pytest.fixture(scope="module")
def given(tower: QwenCheckpoint) -> dict[str, Prompt]:
    pad = [tower.placeholder]
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


@pytest.fixture(params=["mha", "suffix"])
def draft(request: pytest.FixtureRequest) -> str:
    """Drafts rotate by positions alone."""
    return str(request.param)


class TestQwenInEngine(TowerInEngine):
    plan = 12, 48


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


def test_rows_of_images_equal_those_of_transformers(tower: QwenCheckpoint, engine: LLM) -> None:
    encoder = engine.engine.core.executor.parts.model.image_encoder
    assert encoder is not None
    for size in ((60, 45), (1, 1), (24, 24), (400, 300), (8, 100)):
        _, (image,) = expanded(engine, ([tower.placeholder], [picture(*size)]))
        pixels, grid = vision_checkpoints.normalised(image), torch.tensor([image.grid])
        with torch.inference_mode():
            ours = encoder(pixels, image.grid)
            theirs = tower.reference.model.get_image_features(qwen_patches(image), grid)
        deep = [rows for (rows,) in getattr(theirs, "deepstack_features", None) or ()]
        expected = torch.cat([*theirs.pooler_output, *deep], dim=1)
        assert len(ours) == image.num_tokens
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_places_equal_those_of_transformers(
    tower: QwenCheckpoint, engine: LLM, given: dict[str, Prompt]
) -> None:
    """Of whole prompts, of pieces, and behind them."""
    for prompt in given.values():
        tokens, images = expanded(engine, prompt)
        tokens = [*tokens, 5, 6, 7]
        expected = torch.arange(len(tokens))[:, None].expand(-1, 3)
        if images:
            expected = tower.positions(tokens, images)
        whole = np.arange(len(tokens))[:, None] + shifts_at(images, 0, len(tokens))
        assert whole.tolist() == expected.tolist()
        for cut in range(len(tokens) + 1):
            pieces = [shifts_at(images, 0, cut), shifts_at(images, cut, len(tokens))]
            assert np.array_equal(np.concatenate(pieces), shifts_at(images, 0, len(tokens)))


def test_logprobs_equal_those_of_transformers(
    tower: QwenCheckpoint, engine: LLM, given: dict[str, Prompt]
) -> None:
    """Of all tokens behind the first, in one piece and in pieces of 5."""
    prompt = given["three between texts"]
    tokens, images = expanded(engine, prompt)
    expected = tower.logits(tokens, images).log_softmax(-1)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with create(tower, max_num_batched_tokens=5, max_num_seqs=1) as small:
        for llm in (engine, small):
            asked = {"prompt_token_ids": prompt[0], "multi_modal_data": {"image": prompt[1]}}
            (output,) = llm.generate(asked, sampling, use_tqdm=False)
            assert output.prompt_logprobs is not None
            for place, known in enumerate(output.prompt_logprobs[1:], 1):
                assert known is not None
                value = known[tokens[place]].logprob
                assert value == pytest.approx(float(expected[place - 1, tokens[place]]), abs=1e-4)


def test_greedy_tokens_equal_those_of_transformers(
    tower: QwenCheckpoint,
    engine: LLM,
    given: dict[str, Prompt],
    answers: dict[str, list[int]],
) -> None:
    """All in one batch, and once more from the prefix cache; the second time tokens are replayed
    from programs of the first.
    """
    for _ in range(2):
        made = generate(engine, list(given.values()))
        assert dict(zip(given, made, strict=True)) == answers
    assert engine.engine.core.stats.num_replayed_decode_steps > 0
    # As many tokens of as many pixels, otherwise placed.
    wide, tall = (([5, 6, tower.placeholder, 7, 8], [picture(*s)]) for s in ((64, 16), (16, 64)))
    (tokens, (first,)), (_, (second,)) = expanded(engine, wide), expanded(engine, tall)
    assert first.num_tokens == second.num_tokens
    assert generate(engine, [wide, tall]) == [
        tower.greedy(tokens, [first], NEW_TOKENS),
        tower.greedy(tokens, [second], NEW_TOKENS),
    ]


def test_published_names(
    tower: QwenCheckpoint,
    given: dict[str, Prompt],
    answers: dict[str, list[int]],
    tmp_path: Path,
) -> None:
    """Those of others are transformers' own."""
    write = vision_checkpoints.AS_PUBLISHED.get(tower.reference.config.model_type)
    if write is None:
        pytest.skip("the same")
    with create(write(tower, tmp_path)) as llm:
        assert generate(llm, list(given.values())) == list(answers.values())


def test_which_pairs_turn_by_what() -> None:
    assert axes_of_pairs([2, 1, 1], 4, mixed=False).tolist() == [0, 0, 1, 2]
    assert axes_of_pairs([3, 2, 1], 6, mixed=True).tolist() == [0, 1, 2, 0, 1, 0]
    for sections in ([2, 2], [2, 2, 1], [1, 2, 1]):
        with pytest.raises(ValueError, match="mrope_section"):
            axes_of_pairs(sections, 4, mixed=True)


def test_sizes_of_frames_equal_those_of_transformers() -> None:
    """Which has them in a module that needs torchvision."""
    for given, expected in {
        (2, 40, 24, 2, 8, 256, 1024): (24, 16),
        (3, 40, 24, 2, 8, 256, 1024): (16, 8),
        (5, 7, 100, 2, 8, 256, 1024): (8, 48),
        (4, 1, 1, 2, 8, 256, 1024): (8, 8),
        (30, 640, 360, 2, 32, 131072, 786432): (192, 96),
        (7, 3, 20, 2, 8, 4096, 65536): (16, 64),
        (768, 1920, 1080, 2, 32, 4096, 25165824): (224, 128),
        (5, 640, 480, 2, 32, 131072, 786432): (448, 320),
        (2, 31, 17, 2, 8, 1000, 2000): (32, 16),
    }.items():
        assert fitting_frames(*given) == expected
    with pytest.raises(MediaError, match="more than 200 times"):
        fitting_frames(4, 3000, 9, 2, 8, 256, 1024)


Asked = dict[str, Any]


def films(tower: QwenCheckpoint) -> list[Asked]:
    """A video, and one behind an image, in the tokens of a chat."""
    config = tower.reference.config
    video = [config.vision_start_token_id, config.video_token_id, config.vision_end_token_id]
    array = np.stack([np.asarray(frame) for frame in film(40, 16, 4, 1)])
    return [
        {"prompt_token_ids": [5, *video, 6, 7], "multi_modal_data": {"video": film(30, 20, 5)}},
        {
            "prompt_token_ids": [3, tower.placeholder, 4, *video, 8],
            "multi_modal_data": {"image": picture(40, 24), "video": [{"frames": array}]},
        },
    ]


def expanded_film(llm: LLM, asked: Asked) -> tuple[list[int], tuple[ImageInput, ...]]:
    media, engine = MediaLoader(MediaPolicy()), llm.engine
    assert engine.image_processor is not None
    assert engine.video_processor is not None
    items = []
    for given in images_of(asked):
        if isinstance(given, VideoSource):
            items.append(engine.video_processor.process(media.load_video(given)))
        else:
            items.append(engine.image_processor.process(media.load(given)))
    placeholders = engine.image_processor.placeholder_id, engine.video_processor.placeholder_id
    return expand(asked["prompt_token_ids"], items, *placeholders)


def test_videos(tower: QwenCheckpoint, engine: LLM) -> None:
    """Against transformers: rows, places and greedy tokens, whole, cached, cut and with drafts."""
    asked = films(tower)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    expected = []
    for prompt in asked:
        tokens, images = expanded_film(engine, prompt)
        places = np.arange(len(tokens))[:, None] + shifts_at(images, 0, len(tokens))
        assert places.tolist() == tower.positions(tokens, images).tolist()
        expected.append(tower.greedy(tokens, images, NEW_TOKENS))
    given = [*asked, {"prompt_token_ids": [3, 4, 5, 6, 7, 8]}]
    suffix = {"method": "suffix", "num_speculative_tokens": 3}
    with create(tower, max_num_batched_tokens=7, max_num_seqs=3, **suffix) as cut:
        for llm in (engine, engine, cut):
            outputs = llm.generate(given, sampling, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs[:2]] == expected
    config = tower.reference.config
    rows = sum(expanded_film(engine, asked[0])[0].count(t) for t in (config.video_token_id,))
    assert outputs[0].num_image_tokens == rows > 0


def test_times_of_videos(tower: QwenCheckpoint, engine: LLM) -> None:
    """In words, or as places: slower videos reach further."""
    video = engine.engine.video_processor
    assert video is not None
    frames = tuple(film(30, 20, 5))
    if tower.reference.config.model_type != "qwen2_5_vl":
        item = video.process(Video(frames, 4.0))
        text = engine.engine.tokenizer.decode(
            [t for t in item.token_ids if t < len(engine.engine.tokenizer)]
        )
        # The last frame stands for the one that is missing.
        assert text == "<0.1 seconds><0.6 seconds><1.0 seconds>"
        with pytest.raises(MediaError, match="1 frames"):
            video.process(Video(frames[:1], 4.0))
        return
    item = video.process(Video(frames, 0.75))
    assert item.mrope_grid is not None
    assert item.mrope_grid.times == (0, 2, 5)
    assert len(video.process(Video(frames[:1], 4.0)).pixels) == len(item.pixels) // 3
    with pytest.raises(MediaError, match="take more frames a second"):
        video.process(Video(frames, 0.01))


def test_videos_of_chats_and_refused_ones(tower: QwenCheckpoint, engine: LLM) -> None:
    """Frames come as pictures, or as JPEG files in a URL."""
    template = (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}"
        "{% if part.type == 'video' %}[video]{% elif part.type == 'image' %}[image]"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    frames = film(30, 20, 4)
    files = []
    for frame in frames:
        file = io.BytesIO()
        frame.save(file, "jpeg")
        files.append(base64.b64encode(file.getvalue()).decode())
    url = "data:video/jpeg;base64," + ",".join(files)
    content = [
        {"type": "video", "video": frames, "fps": 4},
        {"type": "text", "text": "and"},
        {"type": "image", "image": frames[0]},
        {"type": "video_url", "video_url": {"url": url}},
    ]
    messages, given = marked_images([{"role": "user", "content": content}])
    told = ChatTemplates(engine.engine.tokenizer, template).choose(with_tools=False)
    assert told is not None
    text, order = told.render_images(messages, None, {})
    assert (text, order) == ("[video]and[image][video]", [0, 1, 2])
    media = MediaLoader(MediaPolicy())
    first, second = media.load_video(given[0]), media.load_video(given[2])
    assert (first.fps, second.fps) == (4.0, 2.0)
    assert [frame.size for frame in second.frames] == [(30, 20)] * 4
    for source, told_of in (
        (VideoSource([]), "without frames"),
        (VideoSource([frames[0], picture(8, 8)]), "frame 2 of a video has 8 by 8"),
        (VideoSource(url, 0.0), "fps"),
        (VideoSource("data:video/mp4;base64,AAAA"), "read as frames"),
        (VideoSource(3), "list of frames"),
        (VideoSource([picture(1, 1)] * 769), "at most 768"),
    ):
        with pytest.raises(MediaError, match=told_of):
            media.load_video(source)
    prompt = films(tower)[0]
    with create(tower, limit_mm_per_prompt={"video": 1}) as llm:
        twice = {**prompt, "multi_modal_data": {"video": [frames, frames]}}
        with pytest.raises(RequestRefusedError, match="2 videos in one prompt; at most 1"):
            llm.generate(twice, use_tqdm=False)
    with pytest.raises(RequestRefusedError, match="1 placeholders of videos, and 2 videos"):
        engine.generate(twice, use_tqdm=False)


def test_videos_that_differ_in_a_frame_share_no_block(tower: QwenCheckpoint, engine: LLM) -> None:
    """Behind the video's start, in the cache and for the router; the same by two ways does."""
    config = tower.reference.config
    video = [config.vision_start_token_id, config.video_token_id, config.vision_end_token_id]
    before, frames = list(range(5, 14)), film(30, 20, 6)
    other = film(30, 20, 1, seed=9)
    sampling = SamplingParams(temperature=0, max_tokens=1)
    router = Router(1, 4, 1000)

    def run(given: Any) -> tuple[int, int, list[BlockHash]]:
        """Cached tokens; the first that the video changes; hashes."""
        asked = {
            "prompt_token_ids": [*before, *video, *range(5, 18)],
            "multi_modal_data": {"video": given},
        }
        tokens, images = expanded_film(engine, asked)
        (output,) = engine.generate(asked, sampling, use_tqdm=False)
        assert output.num_cached_tokens is not None
        return output.num_cached_tokens, images[0].start, router.hashes(tokens, "", images)

    engine.reset_prefix_cache()
    cached, start, hashes = run(frames)
    assert (cached, len(before) // 4) == (0, 2)
    for place in (0, 3, 5):
        changed = [*frames[:place], *other, *frames[place + 1 :]]
        cached, _, others = run(changed)
        assert cached <= start
        assert others[: start // 4] == hashes[: start // 4]
        assert not set(others[start // 4 :]) & set(hashes[start // 4 :])
    cached, _, others = run({"frames": frames, "fps": 1})
    assert cached <= start
    assert not set(others[start // 4 :]) & set(hashes[start // 4 :])
    cached, _, others = run([np.stack([np.asarray(frame) for frame in frames])])
    assert cached > start + 4
    assert others == hashes


def test_a_server_reads_videos_as_programs_do(engine: LLM) -> None:
    """Frames that do not fit are resized as all together would be."""
    images, videos = engine.engine.image_processor, engine.engine.video_processor
    assert images is not None
    assert isinstance(videos, QwenVideoProcessor)
    files = []
    for frame in film(70, 50, 5):
        file = io.BytesIO()
        frame.save(file, "jpeg")
        files.append(file.getvalue())
    data = ",".join(base64.b64encode(file).decode() for file in files)
    source = VideoSource(f"data:video/jpeg;base64,{data}", 4)
    media = MediaLoader(MediaPolicy())
    item = videos.process(media.load_video(VideoSource(files, 4)))
    reader = ImageReader(images, media, 1, 1000, videos, 1)
    prompt = reader.read(ServerPrompt([5, videos.placeholder_id, 6], ""), [source], "messages")
    assert prompt.token_ids == [5, *item.token_ids, 6]
    assert prompt.images == (item.at(1),)
    frames = [np.asarray(media.load(file)) for file in files]
    times, rows, columns = item.grid
    size = columns * videos.patch, rows * videos.patch
    assert size != (70, 50)
    resized = qwen_vl._resized(np.stack([*frames, frames[-1]]), *size)
    whole = [qwen_vl.cut(part, videos.patch, videos.merge) for part in np.split(resized, times)]
    assert np.array_equal(item.pixels, np.concatenate(whole))
