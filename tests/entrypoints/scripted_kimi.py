"""A checkpoint in the shape of Kimi-K2.6 that says given texts, with Eagle3 drafts.

As in `scripted.py`, with latent attention: the latents are a layer's normalised inputs, whose norm
leaves them as they are, and only the rotated parts of queries and keys say where to look.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from models import checkpoints
from safetensors.torch import load_file, save_file
from scripted import (
    HALF,
    HEADS,
    ROPE_THETA,
    SIZE,
    ScriptWriter,
    draft_config,
    draft_tensors,
    draw_directions,
    looking_back,
    script_ids,
    shift,
    teach,
    write_draft,
    write_tokenizer,
)

NOPE, ROPE, LOW = 16, 64, 8
V_DIM = SIZE // HEADS
ATTENTION = {"q_lora_rank": LOW, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE}
# Of ten tokens the draft knows nine, so that steps yield all numbers of tokens.
UNKNOWN_TO_DRAFT = 10


def write_kimi(writer: ScriptWriter, folder: Path) -> tuple[Path, dict[str, Path]]:
    """Folders of the target, and of its drafts by their attention."""
    target, drafts = folder / "target", {name: folder / name for name in ("mha", "mla")}
    tokenizer = write_tokenizer(writer, target)
    size = len(tokenizer)
    head = _write_target(script_ids(writer, tokenizer), size, tokenizer.eos_token_id, target)
    known = torch.arange(size)[torch.arange(size) % UNKNOWN_TO_DRAFT > 0]
    config = draft_config(size) | {"draft_vocab_size": len(known)}
    pruned = {
        "lm_head.weight": head[known],
        "d2t": known - torch.arange(len(known)),
        "t2d": torch.isin(torch.arange(size), known),
    }
    for name, path in drafts.items():
        tensors = draft_tensors()
        if name == "mla":
            config |= _LATENT_DRAFT
            tensors = _with_latents(tensors)
        write_draft(path, config, tensors | pruned)
    return target, drafts


_LATENT_DRAFT: dict[str, Any] = {
    **ATTENTION,
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "kv_lora_rank": 2 * SIZE,
    "v_head_dim": V_DIM,
}


@torch.no_grad()
def _write_target(
    scripts: list[list[int]], vocab_size: int, eos: int, folder: Path
) -> torch.Tensor:
    """Write the checkpoint; returns its output head [vocab, SIZE]."""
    checkpoints.kimi_k25(
        folder,
        **ATTENTION,
        vocab_size=vocab_size,
        hidden_size=SIZE,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=SIZE,
        v_head_dim=V_DIM,
        n_routed_experts=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    file = folder / "model.safetensors"
    tensors = load_file(file)
    text = "language_model."
    for name, tensor in tensors.items():
        if name.startswith(text):
            tensor.fill_(1.0 if "norm" in name else 0.0)
    directions = draw_directions(vocab_size)
    embedding = tensors[f"{text}model.embed_tokens.weight"]
    embedding[:, 0] = 1
    embedding[:, 1 : HALF + 1] = directions
    norm = math.sqrt(SIZE / 2)  # what the layer's norm multiplies an embedding by
    for name, tensor in _attention(torch.eye(SIZE), 1 / norm, shift() / norm).items():
        tensors[f"{text}model.layers.0.self_attn.{name}.weight"] = tensor
    head = tensors[f"{text}lm_head.weight"]
    teach(head, directions, scripts)
    save_file(tensors, file, metadata={"format": "pt"})
    return head.clone()


def _attention(latents: torch.Tensor, constant: float, values: torch.Tensor) -> dict[str, Any]:
    """Weights of an attention layer.

    Args:
        latents: [rank, width] of the layer's input, whose first element is constant.
        constant: what makes that element 1.
        values: [SIZE, rank].
    """
    rank, width = latents.shape
    queries = torch.zeros(LOW, width)
    queries[0, 0] = constant
    keys = torch.zeros(ROPE, width)
    keys[:, 0] = _interleaved(0) * constant
    up = torch.zeros(HEADS, NOPE + ROPE, LOW)
    up[:, NOPE:, 0] = _interleaved(1) / math.sqrt(LOW)
    out = torch.zeros(HEADS, NOPE + V_DIM, rank)
    out[:, NOPE:] = values.view(HEADS, V_DIM, rank)
    return {
        "q_a_proj": queries,
        "q_a_layernorm": torch.ones(LOW),
        "q_b_proj": up.flatten(0, 1),
        "kv_a_proj_with_mqa": torch.cat((latents, keys)),
        "kv_a_layernorm": torch.ones(rank),
        "kv_b_proj": out.flatten(0, 1),
        "o_proj": torch.eye(SIZE),
    }


def _with_latents(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A draft's tensors with latent attention; its queries look at their own position."""
    prefix = "midlayer.self_attn."
    values = tensors[f"{prefix}v_proj.weight"]
    latent = _attention(torch.eye(2 * SIZE), 1 / math.sqrt(SIZE / 2), values)
    latent["q_b_proj"] = latent["q_b_proj"].view(HEADS, NOPE + ROPE, LOW)
    latent["q_b_proj"][:, NOPE:, 0] = _interleaved(0) / math.sqrt(LOW)
    latent["q_b_proj"] = latent["q_b_proj"].flatten(0, 1)
    others = {name: t for name, t in tensors.items() if not name.startswith(prefix)}
    return others | {f"{prefix}{name}.weight": tensor for name, tensor in latent.items()}


def _interleaved(distance: int) -> torch.Tensor:
    """`looking_back` [ROPE] where neighbouring elements are rotated."""
    return looking_back(distance, ROPE).view(2, ROPE // 2).T.flatten()
