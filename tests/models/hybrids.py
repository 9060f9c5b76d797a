"""Tiny random checkpoints of models with recurrent states, and what transformers makes of them."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from models.checkpoints import DENSE, MLA, Checkpoint, edit_config, write_checkpoint
from safetensors.torch import load_file, save_file

_LAYERS = ["linear_attention", "full_attention", "linear_attention"]
GDN = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "layer_types": _LAYERS,
}
_EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "shared_expert_intermediate_size": 40,
}
_KDA = {
    **{k: v for k, v in MLA.items() if k not in ("n_routed_experts", "first_k_dense_replace")},
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "num_local_experts": 8,
    "linear_head_dim": 12,
    "linear_num_heads": 4,
    "layer_types": _LAYERS,
}
# By name: transformers' classes of the model and its configuration, and fields of that.
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {**GDN, **_EXPERTS}),
    "qwen3_next-dense": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**GDN, **_EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": False},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", GDN),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**GDN, **_EXPERTS}),
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig", _KDA),
    "kimi_linear-queries": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {**_KDA, "q_lora_rank": 24, "n_group": 4, "topk_group": 2},
    ),
}


@dataclass(frozen=True)
class HybridCheckpoint(Checkpoint):
    """Transformers' logits are those of single tokens: its code for prompts rounds otherwise."""

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        cache, rows = None, []
        for token in tokens:
            output = self.reference(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            rows.append(output.logits[0])
        return torch.cat(rows)


def write_hybrid(name: str, folder: Path, **fields: Any) -> HybridCheckpoint:
    """A checkpoint with the names of published files."""
    model_class, config_class, own = HYBRIDS[name]
    fields = {**DENSE, **own, **fields}
    if name == "qwen3_5_moe":
        del fields["intermediate_size"]
    config = getattr(transformers, config_class)(**fields)
    saved = write_checkpoint(folder, getattr(transformers, model_class)(config))
    return HybridCheckpoint(saved.folder, saved.reference)


def rename_as_transformers(checkpoint: Checkpoint) -> None:
    """Save the weights again, with the names that modules have in transformers."""
    checkpoint.reference.save_pretrained(checkpoint.folder, save_original_format=False)


def wrap_as_seeing(checkpoint: Checkpoint, architecture: str, model_type: str) -> None:
    """Make of a Qwen3.5 text model what is published: inside one that sees, with prediction layers.

    Their weights are of no use.
    """
    folder, file = checkpoint.folder, checkpoint.folder / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(file).items()
    }
    for name in ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight", "mtp.norm.weight"):
        tensors[name] = torch.zeros(2, 2)
    save_file(tensors, file, metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text("{}")
    edit_config(
        folder,
        architectures=[architecture],
        model_type=model_type,
        text_config=text,
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16},
        tie_word_embeddings=False,
    )


@torch.no_grad()
def add_prediction_layer(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Add the prediction layer of Qwen3-Next, of the kind of layer 1 -> its tensors."""
    file = checkpoint.folder / "model.safetensors"
    tensors = load_file(file)
    layer = "model.layers.1."
    shapes = {
        f"mtp.layers.0.{name.removeprefix(layer)}": tensor.shape
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    size = checkpoint.reference.config.hidden_size
    shapes["mtp.fc.weight"] = torch.Size((size, 2 * size))
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"mtp.{name}.weight"] = torch.Size((size,))
    generator = torch.Generator().manual_seed(7)
    own = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        own[name] = noise * (0.3 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5)
    save_file({**tensors, **own}, file, metadata={"format": "pt"})
    return own


class ReferencePrediction:
    """The prediction layer of a checkpoint as transformers' decoder layer, over whole texts."""

    def __init__(self, checkpoint: HybridCheckpoint, tensors: dict[str, torch.Tensor]) -> None:
        self.checkpoint, self.tensors = checkpoint, tensors
        self.model = checkpoint.reference.model
        self.layer = copy.deepcopy(self.model.layers[1])
        begin = "mtp.layers.0."
        own = {n.removeprefix(begin): t for n, t in tensors.items() if n.startswith(begin)}
        if experts := [name for name in own if ".experts." in name]:
            parts = {name: own.pop(name) for name in experts}
            count = 1 + max(int(name.split(".")[2]) for name in parts)
            one = "mlp.experts.{}.{}.weight"
            own["mlp.experts.gate_up_proj"] = torch.stack(
                [
                    torch.cat([parts[one.format(i, n)] for n in ("gate_proj", "up_proj")])
                    for i in range(count)
                ]
            )
            own["mlp.experts.down_proj"] = torch.stack(
                [parts[one.format(i, "down_proj")] for i in range(count)]
            )
        self.layer.load_state_dict(own)

    @torch.inference_mode()
    def draft(self, tokens: list[int]) -> int:
        """The most likely token but one behind a text, of which the last token is new."""
        cache, states = None, []
        for token in tokens[:-1]:
            output = self.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            states.append(output.last_hidden_state)
        embeds = self.model.embed_tokens(torch.tensor([tokens[1:]]))
        joined = torch.cat(
            [
                self._norm(embeds, "pre_fc_norm_embedding"),
                self._norm(torch.cat(states, 1), "pre_fc_norm_hidden"),
            ],
            -1,
        )
        x = joined @ self.tensors["mtp.fc.weight"].T
        positions = torch.arange(x.shape[1])[None]
        future = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        x = self.layer(
            x,
            position_embeddings=self.model.rotary_emb(x, positions),
            attention_mask=future,
            position_ids=positions,
        )
        logits = self.checkpoint.reference.lm_head(self._norm(x, "norm"))
        return int(logits[0, -1].argmax())

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.checkpoint.reference.config.rms_norm_eps
        weight = 1 + self.tensors[f"mtp.{name}.weight"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def list_layers(checkpoint: Checkpoint) -> None:
    """Name the layers of a Kimi-Linear as published: in lists, counted from 1."""
    path = checkpoint.folder / "config.json"
    raw = json.loads(path.read_text())
    kinds = raw.pop("layer_types")
    raw["linear_attn_config"] = {
        "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
        "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
        "head_dim": raw.pop("linear_head_dim"),
        "num_heads": raw.pop("linear_num_heads"),
        "short_conv_kernel_size": raw.pop("linear_conv_kernel_dim"),
    }
    dense = raw.pop("mlp_layer_types").count("dense")
    path.write_text(json.dumps({**raw, "first_k_dense_replace": dense}))
