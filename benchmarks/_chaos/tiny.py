"""Random models of few layers with a tokenizer of bytes, for plans that need no sense."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from _chaos.plan import PICTURE, TEXT

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_CONTEXT = 2048
_OTHER_TEXT = "Käse, naïve café, Ελληνικά, русский текст, 日本語の文章, 한국어, emoji 😀🚀."
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "CONTENT<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT_CONTENT = "{{ message['content'] }}"
_PARTS_CONTENT = (
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}{PICTURE}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{% endfor %}{% endif %}"
)
_MARKERS = [*re.findall(r"<.*?>", PICTURE), "<|video_pad|>"]
_NETWORK = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": _CONTEXT,
    "initializer_range": 0.2,
}


def write_tiny(folder: Path, kind: str = "llama") -> Path:
    """Write the checkpoint, float32, and its tokenizer -> the folder.

    Args:
        kind: `llama`; `hybrid`, a Qwen3.5 with recurrent layers; `images`, a Qwen3-VL.
    """
    tokenizer = _make_tokenizer(_MARKERS if kind == "images" else [])
    content = _PARTS_CONTENT if kind == "images" else _TEXT_CONTENT
    tokenizer.chat_template = _TEMPLATE.replace("CONTENT", content)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _MAKE[kind](tokenizer).to(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind == "images":
        # Up to 16 tokens of an image.
        settings = {"min_pixels": 4 * 8 * 8, "max_pixels": 16 * 8 * 8, "patch_size": 4}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def _make_tokenizer(markers: list[str]) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, _OTHER_TEXT], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    fast.add_tokens(markers, special_tokens=True)
    return fast


def _fields(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Of a text network's configuration."""
    return {
        **_NETWORK,
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _make_llama(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **_fields(tokenizer)))


def _make_hybrid(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        **_fields(tokenizer),
    )
    return Qwen3_5ForCausalLM(config)


def _make_seeing(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    start, image, end, video = tokenizer.convert_tokens_to_ids(_MARKERS)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config={
            **_fields(tokenizer),
            "num_hidden_layers": 2,
            "head_dim": 16,
            "rope_parameters": rope,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": _NETWORK["hidden_size"],
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0],
            "initializer_range": _NETWORK["initializer_range"],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    return Qwen3VLForConditionalGeneration(config)


_MAKE: dict[str, Callable[[PreTrainedTokenizerFast], PreTrainedModel]] = {
    "llama": _make_llama,
    "hybrid": _make_hybrid,
    "images": _make_seeing,
}
KINDS = tuple(_MAKE)
