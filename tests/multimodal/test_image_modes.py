"""Image files of every kind, from their bytes to logits, against transformers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from multimodal import vision_checkpoints
from multimodal.image_engine import create
from multimodal.vision_checkpoints import VisionCheckpoint, idefics3_processor, picture
from pictures import encoded
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.image_utils import load_image

from atom import LLM, SamplingParams

KINDS = ["kimi_k25", "smolvlm"]
NEW_TOKENS = 4


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _with_alpha(mode: str) -> Image.Image:
    image = picture(60, 45).convert(mode)
    image.putalpha(picture(60, 45, 2).convert("L"))
    return image


FILES = {
    "grey": encoded(picture(60, 45).convert("L")),
    "grey with alpha": encoded(_with_alpha("LA")),
    "black and white": encoded(picture(60, 45).convert("1")),
    "palette": encoded(picture(60, 45).convert("P"), transparency=3),
    "CMYK": encoded(picture(60, 45).convert("CMYK"), "JPEG"),
    "16 bits": encoded(Image.fromarray(np.arange(45 * 60, dtype=np.uint16).reshape(45, 60) * 24)),
    "RGBA": encoded(_with_alpha("RGBA")),
    "turned": encoded(picture(60, 45), "JPEG", exif=_exif(6)),
    "mirrored": encoded(picture(60, 45), "WEBP", exif=_exif(2), lossless=True),
    "frames": encoded(
        picture(60, 45), "GIF", save_all=True, append_images=[picture(60, 45, 1).convert("P")]
    ),
    "smallest": encoded(picture(1, 1), "BMP"),
}


@pytest.fixture(scope="module", params=KINDS)
def seeing(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> Iterator[tuple[VisionCheckpoint, LLM]]:
    folder = tmp_path_factory.mktemp("seeing")
    if request.param == "kimi_k25":
        checkpoint = vision_checkpoints.kimi_k25(folder, byte_level_tokenizer)
    else:
        checkpoint = vision_checkpoints.idefics3(folder, byte_level_tokenizer, request.param)
    with create(checkpoint, max_model_len=120) as llm:
        yield checkpoint, llm


def theirs(image: Image.Image, model_type: str) -> dict[str, torch.Tensor]:
    """What transformers' processor gives its model. Kimi-K2.5's needs torchvision, so for images
    that keep their size its arithmetic is here again.
    """
    if model_type == "smolvlm":
        pixels = idefics3_processor(model_type)(image, return_tensors="pt").pixel_values
        return {"pixel_values": pixels}
    rows, columns = (2 * -(-size // 28) for size in (image.height, image.width))
    padded = torch.zeros(3, 14 * rows, 14 * columns)
    padded[:, : image.height, : image.width] = torch.tensor(np.asarray(image)).permute(2, 0, 1)
    patches = (padded / 255 - 0.5) / 0.5
    patches = patches.unfold(1, 14, 14).unfold(2, 14, 14).permute(1, 2, 0, 3, 4).flatten(0, 1)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, rows, columns]])}


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind(seeing: tuple[VisionCheckpoint, LLM], name: str) -> None:
    """All logits of the prompt and of what follows."""
    checkpoint, llm = seeing
    everything: dict[str, Any] = {"logprobs": -1, "prompt_logprobs": -1}
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, **everything)
    prompt = {
        "prompt_token_ids": [5, 6, checkpoint.placeholder, 7, 8],
        "multi_modal_data": {"image": FILES[name]},
    }
    (output,) = llm.generate(prompt, sampling, use_tqdm=False)
    image = load_image(Image.open(io.BytesIO(FILES[name])))
    made, tokens = output.outputs[0], list(output.prompt_token_ids)
    with torch.inference_mode():
        logits = checkpoint.reference(
            torch.tensor([tokens + made.token_ids[:-1]]),
            **theirs(image, checkpoint.reference.config.model_type),
            use_cache=False,
        ).logits[0]
    expected = logits.log_softmax(-1)
    assert expected[len(tokens) - 1 :].argmax(-1).tolist() == made.token_ids
    assert output.prompt_logprobs is not None
    assert made.logprobs is not None
    found = [*output.prompt_logprobs[1:], *made.logprobs]
    assert len(found) == len(expected)
    for row, reference in zip(found, expected, strict=True):
        assert row is not None
        ours = torch.tensor([row[token].logprob for token in range(len(reference))])
        torch.testing.assert_close(ours, reference, atol=1e-4, rtol=1e-4)
