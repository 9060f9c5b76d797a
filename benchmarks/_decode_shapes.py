"""Models of which only the shape matters: configurations in a folder, and no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Attributes:
    about: what it stands for.
    target, draft: fields of `config.json`; the draft is an Eagle3 one.
    has_peer: whether transformers runs the same beside it.
    """

    about: str
    target: Mapping[str, Any]
    draft: Mapping[str, Any]
    has_peer: bool = False


# Published Eagle3 drafts of the Llama-3 models know the most frequent tokens alone.
_LLAMA_DRAFT_VOCAB = 32000


def _llama(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    about: str,
    draft_vocab: int = _LLAMA_DRAFT_VOCAB,
) -> Shape:
    common = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    target = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers}
    draft = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab}
    return Shape(about, common | target, common | draft, has_peer=True)


def _kimi(divisor: int, about: str, **overrides: Any) -> Shape:
    """What one of `divisor` ranks holds of Kimi-K2.5, one dense layer and four with experts unless
    `overrides` say otherwise.

    Source: the text_config of moonshotai/Kimi-K2.5 on the hub.
    """
    common: dict[str, Any] = {
        "hidden_size": 7168,
        "intermediate_size": 18432 // divisor,
        "num_attention_heads": 64 // divisor,
        "num_key_value_heads": 64 // divisor,
        "vocab_size": 163840 // divisor,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    target: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048 // divisor,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    draft = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "head_dim": 128,
        "draft_vocab_size": common["vocab_size"],
    }
    common |= {name: value for name, value in overrides.items() if name in common}
    target |= {name: value for name, value in overrides.items() if name not in common}
    draft["draft_vocab_size"] = common["vocab_size"]
    return Shape(about, common | target, common | draft)


_TINY_KIMI = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
SHAPES = {
    "8b": _llama(4096, 14336, 32, 32, 8, 128256, "Llama-3-8B"),
    "1b": _llama(2048, 8192, 16, 32, 8, 128256, "Llama-3.2-1B, its head not tied"),
    "kimi": _kimi(8, "five layers of Kimi-K2.5 as one rank of eight holds them"),
    "kimi-whole": _kimi(
        1,
        "two layers of Kimi-K2.5 with experts, for several ranks to split",
        vocab_size=32768,
        num_hidden_layers=2,
        first_k_dense_replace=0,
    ),
    "tiny": _llama(64, 128, 2, 4, 2, 128, "for rehearsals", 96),
    "tiny-kimi": _kimi(8, "for rehearsals", **_TINY_KIMI),
    "tiny-kimi-whole": _kimi(
        1,
        "for rehearsals",
        **_TINY_KIMI
        | {
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "first_k_dense_replace": 0,
        },
    ),
}


def write_configs(folder: Path, shape: Shape, context: int) -> tuple[Path, Path]:
    """Folders of the target and of the draft, for contexts of up to `context` tokens."""
    for name, fields in (("target", shape.target), ("draft", shape.draft)):
        (folder / name).mkdir()
        config = {**fields, "max_position_embeddings": context}
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "target", folder / "draft"
