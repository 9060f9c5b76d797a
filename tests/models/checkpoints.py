"""Tiny random checkpoints, written by transformers, whose logits differ by more than rounding."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 96

DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Narrow heads over a wide latent: long prompts expand the latents, short ones absorb.
MLA = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder and the transformers model that wrote it."""

    folder: Path
    reference: PreTrainedModel

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[T, vocab] float32 of the whole sequence at once."""
        return self.reference(torch.tensor([tokens]), use_cache=False).logits[0]

    @torch.inference_mode()
    def hidden_states(self, tokens: list[int]) -> tuple[torch.Tensor, ...]:
        """What enters each layer, then the last layer's output after the final norm."""
        output = self.reference(torch.tensor([tokens]), output_hidden_states=True)
        return tuple(hidden[0] for hidden in output.hidden_states)

    @torch.inference_mode()
    def kv_cache(self, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values [heads, T, d]; of MLA, latents and rotated key parts."""
        cache = self.reference(torch.tensor([tokens]), use_cache=True).past_key_values
        return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def llama(folder: Path, **overrides: Any) -> Checkpoint:
    return write_checkpoint(folder, LlamaForCausalLM(LlamaConfig(**{**DENSE, **overrides})))


def qwen3(folder: Path, **overrides: Any) -> Checkpoint:
    fields = {**DENSE, "head_dim": 16, **overrides}
    return write_checkpoint(folder, Qwen3ForCausalLM(Qwen3Config(**fields)))


def deepseek_v2(folder: Path, **overrides: Any) -> Checkpoint:
    fields = {**DENSE, **MLA, **overrides}
    return write_checkpoint(folder, DeepseekV2ForCausalLM(DeepseekV2Config(**fields)))


def deepseek_v3(folder: Path, **overrides: Any) -> Checkpoint:
    fields = {**DENSE, **MLA, "n_group": 4, "topk_group": 2, **overrides}
    return write_checkpoint(folder, DeepseekV3ForCausalLM(DeepseekV3Config(**fields)))


def kimi_k2(folder: Path, **overrides: Any) -> Checkpoint:
    """The same network and tensors; only the published config's name differs."""
    checkpoint = deepseek_v3(folder, n_group=1, topk_group=1, **overrides)
    edit_config(folder, model_type="kimi_k2", auto_map={"AutoConfig": "configuration.Config"})
    return checkpoint


def kimi_k25(folder: Path, **overrides: Any) -> Checkpoint:
    """As published: layers called `layers`, and a nested `kimi_k2` text config."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    text = {**DENSE, **MLA, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1}
    vision = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
    }
    config = Kimi_K25Config(
        text_config=text | overrides,
        vision_config=vision,
        projection_hidden_size=16,
        tie_word_embeddings=False,
    )
    checkpoint = write_checkpoint(folder, Kimi_K25ForConditionalGeneration(config))
    file = folder / "model.safetensors"
    # transformers writes `blocks` for both networks' layers; published text networks differ.
    tensors = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    text_config = json.loads((folder / "config.json").read_text())["text_config"]
    edit_config(
        folder,
        architectures=["KimiK25ForConditionalGeneration"],
        text_config={**text_config, "model_type": "kimi_k2"},
    )
    return checkpoint


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.no_grad()
def write_checkpoint(
    folder: Path, model: PreTrainedModel, never_sampled: int | list[int] | None = None
) -> Checkpoint:
    """Args:
    never_sampled: a token whose logit is 0, or several.
    """
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(part in name for part in ("inv_freq", "vision", "visual", "embed_scale")):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            tensor.copy_(noise * 1.5 / tensor.shape[-1] ** 0.5)
        elif name.endswith("norm.weight"):
            tensor.copy_(1 + 0.3 * noise)
        else:
            tensor.copy_(0.3 * noise)
    if never_sampled is not None:
        model.lm_head.weight[never_sampled] = 0
    model.to(torch.float32).eval().save_pretrained(folder)
    return Checkpoint(folder, model)
