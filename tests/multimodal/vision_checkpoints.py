"""Tiny random vision models, written by transformers, whose images change the answer."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import checkpoints
from models.checkpoints import DENSE, MLA, write_checkpoint
from PIL import Image
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from atom.messages import ImageInput

# Settings under which a few tens of pixels are a few tokens, and hundreds are made smaller.
KIMI_SETTINGS = {
    "media_proc_cfg": {"in_patch_limit": 64, "patch_size": 14, "patch_limit_on_one_side": 24}
}


@dataclass(frozen=True)
class VisionCheckpoint:
    """Attributes:
    placeholder: the token that stands for an image.
    """

    folder: Path
    reference: PreTrainedModel
    placeholder: int

    @torch.inference_mode()
    def greedy(self, token_ids: list[int], images: Sequence[ImageInput], count: int) -> list[int]:
        """What transformers generates behind expanded tokens."""
        tokens = list(token_ids)
        given = self._pixels(images)
        for _ in range(count):
            output = self.reference(torch.tensor([tokens]), use_cache=False, **given)
            tokens.append(int(output.logits[0, -1].argmax()))
        return tokens[len(token_ids) :]

    @torch.inference_mode()
    def logits(self, token_ids: list[int], images: Sequence[ImageInput]) -> torch.Tensor:
        """[T, vocab]."""
        given = self._pixels(images)
        return self.reference(torch.tensor([token_ids]), use_cache=False, **given).logits[0]

    def _pixels(self, images: Sequence[ImageInput]) -> dict[str, torch.Tensor]:
        if not images:
            return {}
        pixels = torch.cat([normalised(image) for image in images])
        grids = torch.tensor([[1, *image.grid] for image in images])
        return {"pixel_values": pixels, "image_grid_thw": grids}


def normalised(image: ImageInput) -> torch.Tensor:
    """What transformers' processor would give its model."""
    stored = np.frombuffer(image.pixels, np.uint8).reshape(image.shape).astype(np.float32)
    of_channels = (-1, 1, 1)
    mean, std = (np.array(x, np.float32).reshape(of_channels) for x in (image.mean, image.std))
    return torch.from_numpy((stored - mean) / std)


def kimi_k25(
    folder: Path, tokenizer: PreTrainedTokenizerFast, **overrides: Any
) -> VisionCheckpoint:
    """As published: names of the hub, settings beside it, and a placeholder in the vocabulary."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    placeholder = len(tokenizer) + 1
    text = {**DENSE, **MLA, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1}
    text |= {"vocab_size": len(tokenizer) + 4, "max_position_embeddings": 256, **overrides}
    config = Kimi_K25Config(
        text_config=text,
        vision_config={
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "pos_emb_height": 6,
            "pos_emb_width": 6,
        },
        projection_hidden_size=32,
        image_token_id=placeholder,
        tie_word_embeddings=False,
    )
    model = _with_random_tower(Kimi_K25ForConditionalGeneration(config))
    checkpoint = write_checkpoint(folder, model, never_sampled=placeholder)
    (folder / "preprocessor_config.json").write_text(json.dumps(KIMI_SETTINGS))
    checkpoints.edit_config(folder, architectures=["KimiK25ForConditionalGeneration"])
    tokenizer.save_pretrained(folder)
    return VisionCheckpoint(folder, checkpoint.reference, placeholder)


@torch.no_grad()
def _with_random_tower(model: PreTrainedModel) -> PreTrainedModel:
    """Its towers are left alone by `write_checkpoint`."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in model.named_parameters():
        if "vision" in name:
            noise = torch.randn(tensor.shape, generator=generator)
            fan_in = tensor[0].numel() if tensor.dim() > 1 else 1
            tensor.copy_(noise * (1.5 / fan_in**0.5 if tensor.dim() > 1 else 0.3))
            if "norm" in name and name.endswith("weight"):
                tensor.add_(1)
            if "pos" in name:
                tensor.copy_(noise)
    return model


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Random stripes and noise, RGB."""
    rng = np.random.default_rng([width, height, seed])
    stripes = rng.integers(0, 256, (1 + height // 9, 1 + width // 9, 3))
    grown = np.kron(stripes, np.ones((9, 9, 1)))[:height, :width]
    noise = rng.integers(-30, 31, (height, width, 3))
    return Image.fromarray(np.clip(grown + noise, 0, 255).astype(np.uint8))


IDEFICS_TILE = 16
_MARKERS = ["<fake_token_around_image>", "<image>", "<global-img>"]


def idefics3(folder: Path, tokenizer: PreTrainedTokenizerFast, kind: str) -> VisionCheckpoint:
    """An `idefics3` or `smolvlm` model, whose images are up to nine tiles and the whole.

    Args:
        tokenizer: not changed; the checkpoint's has more tokens.
    """
    import transformers

    own = copy.deepcopy(tokenizer)
    places = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
    own.add_tokens([*_MARKERS, *places], special_tokens=True)
    placeholder = own.convert_tokens_to_ids("<image>")
    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[kind]
    config = getattr(transformers, f"{name}Config")(
        text_config={**DENSE, "model_type": "llama", "vocab_size": len(own)},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": IDEFICS_TILE,
            "patch_size": 4,
        },
        scale_factor=2,
        image_token_id=placeholder,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    model = _with_random_tower(getattr(transformers, f"{name}ForConditionalGeneration")(config))
    checkpoint = write_checkpoint(folder, model, never_sampled=placeholder)
    processor = idefics3_processor(kind)
    processor.save_pretrained(folder)
    own.save_pretrained(folder)
    return IdeficsCheckpoint(folder, checkpoint.reference, placeholder)


def idefics3_processor(kind: str, **settings: Any) -> Any:
    """Transformers' image processor of these models."""
    import transformers

    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[kind]
    return getattr(transformers, f"{name}ImageProcessorPil")(
        size={"longest_edge": 3 * IDEFICS_TILE},
        max_image_size={"longest_edge": IDEFICS_TILE},
        **settings,
    )


class IdeficsCheckpoint(VisionCheckpoint):
    """Its images are tiles."""

    def _pixels(self, images: Sequence[ImageInput]) -> dict[str, torch.Tensor]:
        if not images:
            return {}
        return {"pixel_values": torch.cat([normalised(image) for image in images])[None]}
