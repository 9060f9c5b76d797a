"""Tiny random vision models, written by transformers, whose images change the answer."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import checkpoints
from models.checkpoints import DENSE, MLA, write_checkpoint
from models.hybrids import GDN
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
        for _ in range(count):
            given = self._given(tokens, images)
            output = self.reference(torch.tensor([tokens]), use_cache=False, **given)
            tokens.append(int(output.logits[0, -1].argmax()))
        return tokens[len(token_ids) :]

    @torch.inference_mode()
    def logits(self, token_ids: list[int], images: Sequence[ImageInput]) -> torch.Tensor:
        """[T, vocab]."""
        given = self._given(token_ids, images)
        return self.reference(torch.tensor([token_ids]), use_cache=False, **given).logits[0]

    def _given(self, token_ids: list[int], images: Sequence[ImageInput]) -> dict[str, torch.Tensor]:
        """What goes with the tokens."""
        return self._pixels(images)

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
        if "vision" in name or "visual" in name:
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


# Settings under which images are up to 16 tokens.
QWEN_SETTINGS = {"min_pixels": 4 * 8 * 8, "max_pixels": 16 * 8 * 8, "patch_size": 4}
QWEN_VIDEO_SETTINGS = {"size": {"shortest_edge": 512, "longest_edge": 1024}, "patch_size": 4}
_QWEN_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": DENSE["hidden_size"],
}
# By type: the classes' name, how tokens rotate, the tower, and the text network.
_QWEN_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # Windows of two by two tokens in two of three layers.
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"mrope_section": [2, 2, 2]},
        {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 1},
        {},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"mrope_section": [3, 2, 1], "mrope_interleaved": True},
        {"num_position_embeddings": 25, "deepstack_visual_indexes": [2, 0]},
        {"head_dim": 12},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"mrope_section": [3, 2, 1], "mrope_interleaved": True},
        {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1, 2]},
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    ),
    "qwen3_5": (
        "Qwen3_5",
        {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
        {"num_position_embeddings": 25},
        GDN,
    ),
}


def qwen_vl(folder: Path, tokenizer: PreTrainedTokenizerFast, kind: str) -> QwenCheckpoint:
    """A model of one of the types above."""
    import transformers

    name, rope, tower, own = _QWEN_KINDS[kind]
    text = {**DENSE, "vocab_size": len(tokenizer) + 4, "max_position_embeddings": 256, **own}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **rope}
    image, video = len(tokenizer) + 1, len(tokenizer) + 2
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config={**_QWEN_TOWER, **tower},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=len(tokenizer),
        vision_end_token_id=len(tokenizer) + 3,
    )
    network = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    checkpoint = write_checkpoint(folder, _with_random_tower(network), [image, video])
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN_SETTINGS))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(QWEN_VIDEO_SETTINGS))
    tokenizer.save_pretrained(folder)
    return QwenCheckpoint(folder, checkpoint.reference, image)


def qwen2_5_vl_as_published(own: QwenCheckpoint, folder: Path) -> QwenCheckpoint:
    """The same with the hub's names of tensors, and the text's fields beside the others."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(own.folder, folder, dirs_exist_ok=True)
    renames = (("model.language_model.", "model."), ("model.visual.", "visual."))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for theirs, published in renames:
            name = name.replace(theirs, published)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    del text["model_type"]
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (folder / "config.json").write_text(json.dumps({**text, **config}))
    return QwenCheckpoint(folder, own.reference, own.placeholder)


def qwen3_vl_moe_as_published(own: QwenCheckpoint, folder: Path) -> QwenCheckpoint:
    """The same with experts whose inputs come before their outputs."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(own.folder, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return QwenCheckpoint(folder, own.reference, own.placeholder)


AS_PUBLISHED = {
    "qwen2_5_vl": qwen2_5_vl_as_published,
    "qwen3_vl_moe": qwen3_vl_moe_as_published,
}


class QwenCheckpoint(VisionCheckpoint):
    """Its tokens rotate by three numbers, and a patch is two frames deep."""

    def positions(self, token_ids: list[int], images: Sequence[ImageInput]) -> torch.Tensor:
        """[T, 3], those that transformers rotates by."""
        given = self._given(token_ids, images)
        for name in ("pixel_values", "pixel_values_videos"):
            given.pop(name, None)
        model = self.reference.model
        return model.get_rope_index(torch.tensor([token_ids]), **given)[0][:, 0].T

    def _given(self, token_ids: list[int], images: Sequence[ImageInput]) -> dict[str, torch.Tensor]:
        if not images:
            return {}
        config, tokens = self.reference.config, torch.tensor([token_ids])
        image_tokens, video_tokens = (
            tokens == config.image_token_id,
            tokens == config.video_token_id,
        )
        given = {"mm_token_type_ids": (image_tokens + 2 * video_tokens).int()}
        for suffix, kind, places in (
            ("", "image", image_tokens),
            ("_videos", "video", video_tokens),
        ):
            own = [image for image in images if places[0, image.start]]
            if own:
                patches = [qwen_patches(image) for image in own]
                given[f"pixel_values{suffix}"] = torch.cat(patches)
                given[f"{kind}_grid_thw"] = torch.tensor([image.grid for image in own])
                if kind == "video" and config.model_type == "qwen2_5_vl":
                    # Of two frames a second.
                    given["second_per_grid_ts"] = torch.ones(len(own))
        return given


def qwen_patches(image: ImageInput) -> torch.Tensor:
    """What transformers' processor makes of it: [N, channels * frames * patch * patch]."""
    patches = normalised(image).transpose(1, 2)
    return patches.expand(-1, -1, 2, -1, -1).flatten(1)


def film(width: int, height: int, count: int, seed: int = 0) -> list[Image.Image]:
    """Frames that differ."""
    return [picture(width, height, 100 * seed + i) for i in range(count)]
