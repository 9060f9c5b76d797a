"""The arithmetic of Kimi-K2.5's processor, and its published settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multimodal.vision_checkpoints import picture
from PIL import Image

from atom.config import ConfigError, ModelOptions
from atom.model_loader.source import resolve_model
from atom.models.vision.kimi_k25 import KimiVisionSizes
from atom.multimodal.processors.kimi_k25 import KimiImageProcessor
from atom.multimodal.processors.table import create_image_processor

PUBLISHED = {
    "media_proc_cfg": {
        "in_patch_limit": 16384,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
    }
}
# Sizes as transformers' processor computes them: an image, what it is resized to, rows and columns
# of its patches.
SIZES = [
    ((28, 28), (28, 28), (2, 2)),
    ((1, 1), (1, 1), (2, 2)),
    ((1920, 1080), (1920, 1080), (78, 138)),
    ((3000, 4000), (1554, 2073), (150, 112)),
    ((8000, 30), (7168, 26), (2, 512)),
    ((13, 9000), (10, 7168), (512, 2)),
    ((3584, 3584), (1792, 1792), (128, 128)),
]


@pytest.mark.parametrize(("size", "fitting", "grid"), SIZES)
def test_sizes(size: tuple[int, int], fitting: tuple[int, int], grid: tuple[int, int]) -> None:
    processor = KimiImageProcessor.of(PUBLISHED, 5)
    assert processor.fitting(*size) == fitting
    if size[0] * size[1] < 300_000:
        item = processor.process(Image.new("RGB", size))
        assert item.grid == grid
        assert item.num_tokens == grid[0] * grid[1] // 4 == len(item.token_ids)


def test_patches_are_pieces_of_the_resized_image_row_by_row() -> None:
    """What is padded is black, and no pixel is changed otherwise."""
    settings = {"max_patches": 24, "size": {"max_height": 8, "max_width": 8}, "merge_size": 2}
    image = picture(150, 100)
    item = KimiImageProcessor.of(settings, 5).process(image)
    width, height = KimiImageProcessor.of(settings, 5).fitting(150, 100)
    assert (width, height) != image.size
    rows, columns = item.grid
    canvas = Image.new("RGB", (columns * 14, rows * 14))
    canvas.paste(image.resize((width, height), Image.Resampling.BICUBIC))
    for place, patch in enumerate(item.pixels):
        row, column = divmod(place, columns)
        box = (column * 14, row * 14, column * 14 + 14, row * 14 + 14)
        assert np.array_equal(patch, np.asarray(canvas.crop(box)).transpose(2, 0, 1))


def test_digests_are_of_pixels_and_settings() -> None:
    one, other = picture(60, 45), picture(60, 45, 1)
    processor = KimiImageProcessor.of(PUBLISHED, 5)
    assert processor.process(one).digest == processor.process(one.copy()).digest
    assert processor.process(one).digest != processor.process(other).digest
    normed = KimiImageProcessor.of({"image_mean": [0.4, 0.5, 0.5]}, 5)
    assert normed.process(one).digest != processor.process(one).digest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"media_proc_cfg": {"fixed_output_tokens": 64}}, "fixed_output_tokens"),
        ({"patch_size": 0}, "patch_size"),
        ({"do_rescale": False}, "255"),
        ({"image_mean": [0.5]}, "image_mean"),
    ],
)
def test_settings_that_cannot_be_honoured(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KimiImageProcessor.of(settings, 5)


def test_the_published_config_names_the_tower_otherwise(tmp_path: Path) -> None:
    from models.checkpoints import DENSE, MLA

    vision = {
        "init_pos_emb_height": 6,
        "init_pos_emb_width": 5,
        "merge_kernel_size": [2, 2],
        "patch_size": 14,
        "projector_ln_eps": 1e-4,
        "vt_hidden_size": 32,
        "vt_intermediate_size": 48,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 3,
    }
    text = {**DENSE, **MLA, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "media_placeholder_token_id": 90,
        "text_config": text | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        "vision_config": vision,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PUBLISHED))
    options = ModelOptions(model=str(tmp_path), load_format="dummy")
    source = resolve_model(options)
    sizes = KimiVisionSizes.of(source.hf_config)
    assert (sizes.hidden, sizes.heads, sizes.layers, sizes.intermediate) == (32, 2, 3, 48)
    assert (sizes.table, sizes.projector_eps) == ((6, 5), 1e-4)
    processor = create_image_processor(source, options, None)
    assert processor is not None
    assert processor.placeholder_id == 90
