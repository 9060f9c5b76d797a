"""Tiny Eagle3 drafts on disk, loaded as the engine loads them and run over a paged cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from model_ops.batches import Part, attention_metadata
from safetensors.torch import save_file

from atom.config import ModelOptions
from atom.kv_cache.builders import bind_kv_caches
from atom.model_loader.drafts.eagle3 import load_draft
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.source import ModelSource
from atom.model_ops.attention.metadata import ModelInput
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.models.eagle3.base import Eagle3Draft
from atom.platform import cpu_platform
from atom.spec_decode.eagle3_draft_builder import Eagle3DraftBuilder

HIDDEN, VOCAB, DRAFT_VOCAB, NUM_LAYERS = 32, 96, 40, 8
CPU = torch.device("cpu")

MHA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "max_position_embeddings": 256,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "use_aux_hidden_state": True},
}

MLA: dict[str, Any] = {
    **MHA,
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

# P-EAGLE.
PARALLEL: dict[str, Any] = {
    **MHA,
    "architectures": ["PeagleLlamaForCausalLM"],
    "num_hidden_layers": 3,
    "ptd_token_id": 7,
}

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def draft_tensors(
    raw: dict[str, Any], embed: bool = False, head: bool = True, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A random checkpoint for a config, with `midlayer.` names."""
    raw = {**raw["eagle_config"], **raw}
    generator = torch.Generator().manual_seed(seed)
    size, wide, target = raw["hidden_size"], raw["intermediate_size"], raw.get("target_hidden_size")
    target = target or size
    num_aux = len(raw.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0))
    shapes = {"fc": (size, num_aux * target), "norm": (size,)}
    shapes |= {f"fc_norm.{i}": (target,) for i in range(num_aux) if raw.get("fc_norm")}
    if raw.get("norm_before_fc"):
        shapes["input_norm"] = (num_aux * target,)
    layer = dict.fromkeys(("input_layernorm", "hidden_norm"), (size,))
    layer |= {"post_attention_layernorm": (size,), "mlp.down_proj": (size, wide)}
    layer |= {"mlp.gate_proj": (wide, size), "mlp.up_proj": (wide, size)}
    layer |= {f"self_attn.{k}": v for k, v in _attention_shapes(raw).items()}
    shapes |= {f"midlayer.{k}": v for k, v in layer.items()}
    if embed:
        shapes["embed_tokens"] = (raw["vocab_size"], size)
    if head:
        shapes["lm_head"] = (raw["draft_vocab_size"], size)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[f"{name}.weight"] = noise * 0.3 + 1 if len(shape) == 1 else noise * 0.2
        is_attention, is_mlp = ".self_attn." in name, ".mlp." in name
        biased = (is_attention and raw.get("attention_bias")) or (is_mlp and raw.get("mlp_bias"))
        if biased and len(shape) == 2:
            tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.2
    if raw["draft_vocab_size"] != raw["vocab_size"]:
        chosen = torch.randperm(raw["vocab_size"], generator=generator)[: raw["draft_vocab_size"]]
        chosen = chosen.sort().values
        tensors["d2t"] = chosen - torch.arange(len(chosen))
        tensors["t2d"] = torch.zeros(raw["vocab_size"], dtype=torch.bool)
        tensors["t2d"][chosen] = True
    return tensors


def parallel_tensors(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A random P-EAGLE checkpoint: an Eagle3 draft's, deeper layers, and the state of masks."""
    tensors = draft_tensors(raw)
    generator = torch.Generator().manual_seed(5)
    size, wide = raw["hidden_size"], tensors["fc.weight"].shape[1]
    shapes: dict[str, tuple[int, ...]] = {"mask_hidden": (1, 1, wide)}
    for i in range(1, raw["num_hidden_layers"]):
        for name, tensor in tensors.items():
            if not name.startswith("midlayer.") or "hidden_norm" in name:
                continue
            shape = list(tensor.shape)
            if any(f".{part}_proj." in name for part in "qkv"):
                shape[1] = size
            shapes[name.replace("midlayer", f"layers.{i}")] = tuple(shape)
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = noise * 0.3 + 1 if "norm" in name else noise * 0.2
    return tensors


def _attention_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    if not raw.get("kv_lora_rank"):
        dim = raw.get("head_dim", size // heads)
        kv = raw["num_key_value_heads"] * dim
        shapes = {"q_proj": (heads * dim, 2 * size), "o_proj": (size, heads * dim)}
        return {**shapes, "k_proj": (kv, 2 * size), "v_proj": (kv, 2 * size)}
    rank, nope, rope = raw["kv_lora_rank"], raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
    shapes = {
        "kv_a_proj_with_mqa": (rank + rope, 2 * size),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + raw["v_head_dim"]), rank),
        "o_proj": (size, heads * raw["v_head_dim"]),
    }
    low = raw.get("q_lora_rank")
    if low is None:
        return {**shapes, "q_proj": (heads * (nope + rope), 2 * size)}
    shapes |= {"q_a_proj": (low, 2 * size), "q_a_layernorm": (low,)}
    return {**shapes, "q_b_proj": (heads * (nope + rope), low)}


def write_draft(folder: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(
    folder: Path, target: CausalLM, source: ModelSource, context: LayerContext | None = None
) -> Eagle3Draft:
    context = context or LayerContext.create(torch.float32, 128, cpu_platform())
    return load_draft(str(folder), DraftTarget(target, source, context, ModelOptions()))


class DraftBench:
    """One draft with its cache; sequences are named and their blocks lie scattered.

    Attributes:
        builder: owns the draft's cache.
    """

    def __init__(self, draft: Eagle3Draft, block_size: int = 4, num_blocks: int = 32) -> None:
        self.draft = draft
        self.block_size = block_size
        self.builder = Eagle3DraftBuilder(draft, block_size, torch.float32, CPU)
        self.pools = self.builder.allocate_kv_cache_tensors(num_blocks)
        bind_kv_caches(draft, [self.builder])
        # Far apart and never in order, so that a wrong table shows.
        self._free = [(7 * i + 3) % num_blocks for i in range(num_blocks)]
        self._blocks: dict[str, list[int]] = {}

    @torch.inference_mode()
    def forward(
        self, rows: dict[str, tuple[int, Sequence[int], torch.Tensor]]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """For each sequence (start, next tokens, hidden) -> what head and next step read."""
        parts = [self._schedule(name, start, ids) for name, (start, ids, _) in rows.items()]
        positions = [p.start + i for p in parts for i in range(p.num_tokens)]
        model_input = ModelInput(
            torch.tensor([t for _, ids, _ in rows.values() for t in ids]),
            torch.tensor(positions),
            attention_metadata(parts, self.block_size, CPU),
        )
        post, fed = self.draft(model_input, torch.cat([hidden for _, _, hidden in rows.values()]))
        lengths = [p.num_tokens for p in parts]
        return dict(
            zip(rows, zip(post.split(lengths), fed.split(lengths), strict=True), strict=True)
        )

    @torch.inference_mode()
    def propose(
        self, name: str, start: int, next_tokens: Sequence[int], fused: torch.Tensor, k: int
    ) -> tuple[list[int], torch.Tensor]:
        """One pass over the rows, then k - 1 single steps -> k target token ids.

        With them the post-norm states [k, hidden] that they were chosen from.
        """
        post, fed = self.forward({name: (start, next_tokens, fused)})[name]
        at, drafts, states = start + len(next_tokens), [], []
        while True:
            states.append(post[-1])
            draft_ids = self.draft.compute_logits(post[-1:]).argmax(-1)
            drafts += self.draft.to_target_ids(draft_ids).tolist()
            if len(drafts) == k:
                return drafts, torch.stack(states)
            hidden = fed[-1:]
            post, fed = self.forward({name: (at, drafts[-1:], hidden)})[name]
            at += 1

    def _schedule(self, name: str, start: int, token_ids: Sequence[int]) -> Part:
        blocks = self._blocks.setdefault(name, [])
        while len(blocks) * self.block_size < start + len(token_ids):
            blocks.append(self._free.pop())
        return Part(len(token_ids), start, list(blocks))
