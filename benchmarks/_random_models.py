"""Small checkpoints of published shapes with random weights, and the embedded model's tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from atom.config import ModelOptions
from atom.model_loader.source import resolve_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _qwen3_next() -> PretrainedConfig:
    """Three layers in four with Gated DeltaNet, experts in all: 200 million weights."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=49152,
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        bos_token_id=1,
        eos_token_id=2,
    )


SHAPES: Mapping[str, Callable[[], PretrainedConfig]] = {"qwen3-next-200m": _qwen3_next}


def write_random_model(shape: str, folder: Path) -> Path:
    """A checkpoint in bfloat16 in `folder`, which is returned."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    _copy_tokenizer(folder)
    return folder


def write_kimi_k25(folder: Path, tower_layers: int) -> Path:
    """Kimi-K2.5's tower and projector with a text network of two small layers."""
    import json

    import torch
    from transformers import (
        Kimi_K25Config,
        Kimi_K25ForConditionalGeneration,
        Kimi_K25ImageProcessor,
    )

    torch.manual_seed(0)
    placeholder, size = 49151, 512
    config = Kimi_K25Config(
        text_config={
            "model_type": "deepseek_v3",
            "vocab_size": 49152,
            "hidden_size": size,
            "intermediate_size": 1024,
            "num_hidden_layers": 2,
            "first_k_dense_replace": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "q_lora_rank": 256,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 32768,
        },
        vision_config={"num_hidden_layers": tower_layers},
        projection_hidden_size=1152,
        image_token_id=placeholder,
        tie_word_embeddings=False,
    )
    with torch.device("cpu"):
        model = Kimi_K25ForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    Kimi_K25ImageProcessor().save_pretrained(folder)
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    fields["architectures"] = ["Kimi_K25ForConditionalGeneration"]
    file.write_text(json.dumps(fields))
    _copy_tokenizer(folder)
    return folder


def _copy_tokenizer(folder: Path) -> None:
    embedded = resolve_model(ModelOptions(quantization="none")).path
    for file in embedded.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copy(file, folder)
