"""Tiny random checkpoints of Kimi-K3 as published, and their computation, written down alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

LINEAR = {
    "full_attn_layers": [3, 5],
    "kda_layers": [1, 2, 4],
    "head_dim": 16,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0,
    "use_full_rank_gate": True,
}
TEXT = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "float32",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config": LINEAR,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "hidden_act": "situ",
    "activation_situ_beta": 1.5,
    "activation_situ_linear_beta": 3.0,
    "attn_res_block_size": 2,
}
_TRUNK = "language_model.model."


def _shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of all tensors of the text model."""
    size, heads, vocab = c["hidden_size"], c["num_attention_heads"], c["vocab_size"]
    linear = c["linear_attn_config"]
    width = linear["num_heads"] * linear["head_dim"]
    nope, rope, v, rank = (
        c[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    latent, inter = c["routed_expert_hidden_size"], c["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{_TRUNK}embed_tokens.weight": (vocab, size),
        f"{_TRUNK}norm.weight": (size,),
        f"{_TRUNK}output_attn_res_norm.weight": (size,),
        f"{_TRUNK}output_attn_res_proj.weight": (1, size),
        "language_model.lm_head.weight": (vocab, size),
    }
    for i in range(c["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {}
        for name in ("input_layernorm", "post_attention_layernorm"):
            own[f"{name}.weight"] = (size,)
        for name in ("self_attention_res", "mlp_res"):
            own[f"{name}_norm.weight"], own[f"{name}_proj.weight"] = (size,), (1, size)
        if i + 1 in linear["kda_layers"]:
            attention = {
                **{f"{n}_proj.weight": (width, size) for n in "qkvg"},
                **{f"{n}_conv1d.weight": (width, 1, 4) for n in "qkv"},
                "f_a_proj.weight": (linear["head_dim"], size),
                "f_b_proj.weight": (width, linear["head_dim"]),
                "b_proj.weight": (linear["num_heads"], size),
                "A_log": (linear["num_heads"] + 3,),
                "dt_bias": (width,),
                "o_norm.weight": (linear["head_dim"],),
                "o_proj.weight": (size, width),
            }
        else:
            attention = {
                "q_a_proj.weight": (c["q_lora_rank"], size),
                "q_a_layernorm.weight": (c["q_lora_rank"],),
                "q_b_proj.weight": (heads * (nope + rope), c["q_lora_rank"]),
                "kv_a_proj_with_mqa.weight": (rank + rope, size),
                "kv_a_layernorm.weight": (rank,),
                "kv_b_proj.weight": (heads * (nope + v), rank),
                "g_proj.weight": (heads * v, size),
                "o_proj.weight": (size, heads * v),
            }
        own |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        if i < c["first_k_dense_replace"]:
            own |= _mlp("mlp.", size, c["intermediate_size"])
        else:
            moe = "block_sparse_moe."
            own[f"{moe}gate.weight"] = (c["num_experts"], size)
            own[f"{moe}gate.e_score_correction_bias"] = (c["num_experts"],)
            own[f"{moe}routed_expert_down_proj.weight"] = (latent, size)
            own[f"{moe}routed_expert_norm.weight"] = (latent,)
            own[f"{moe}routed_expert_up_proj.weight"] = (size, latent)
            own |= _mlp(f"{moe}shared_experts.", size, inter * c["num_shared_experts"])
            for e in range(c["num_experts"]):
                expert = f"{moe}experts.{e}."
                own[f"{expert}w1.weight"] = own[f"{expert}w3.weight"] = (inter, latent)
                own[f"{expert}w2.weight"] = (latent, inter)
        shapes |= {f"{_TRUNK}layers.{i}.{name}": shape for name, shape in own.items()}
    return shapes


def _mlp(prefix: str, size: int, inter: int) -> dict[str, tuple[int, ...]]:
    ups = {f"{prefix}{name}_proj.weight": (inter, size) for name in ("gate", "up")}
    return {**ups, f"{prefix}down_proj.weight": (size, inter)}


def write_kimi_k3(folder: Path, **fields: Any) -> KimiK3:
    """A checkpoint with the names of published files.

    Args:
        fields: of its text configuration.
    """
    text = {**TEXT, **fields}
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in _shapes(text).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            noise[text["linear_attn_config"]["num_heads"] :] = 0
            tensors[name] = 0.3 * noise
        elif len(shape) > 1:
            tensors[name] = noise * (1.5 / shape[-1] ** 0.5)
        else:
            tensors[name] = 0.3 * noise + name.endswith("norm.weight")
    raw = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
        "vision_config": {"vt_num_hidden_layers": 1, "vt_hidden_size": 16, "patch_size": 14},
        "media_placeholder_token_id": 9,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    towers = ("vision_tower.patch_embed.weight", "mm_projector.proj.0.weight")
    unread = {name: torch.zeros(2, 2) for name in towers}
    save_file({**tensors, **unread}, folder / "model.safetensors", metadata={"format": "pt"})
    return KimiK3(folder, text, tensors)


@dataclass(frozen=True)
class KimiK3:
    """A folder, its text configuration and its tensors."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[T, vocab]."""
        return self.states(tokens)[1] @ self.tensors["language_model.lm_head.weight"].T

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The running sum before each layer and behind the last, and what the head reads."""
        running = self._of("embed_tokens")[tokens]
        closed: list[torch.Tensor] = []
        sums = [running]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"layers.{i}."
            x = running
            if closed:
                x = self._mixed(closed, running, f"{layer}self_attention_res")
            attended = self._attention(i, self._norm(x, f"{layer}input_layernorm"))
            if i % self.config["attn_res_block_size"] == 0:
                closed.append(running)
                running = attended
            else:
                running = running + attended
            x = self._mixed(closed, running, f"{layer}mlp_res")
            running = running + self._feed(i, self._norm(x, f"{layer}post_attention_layernorm"))
            sums.append(running)
        return sums, self._norm(self._mixed(closed, running, "output_attn_res"), "norm")

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        text = list(tokens)
        for _ in range(count):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[len(tokens) :]

    def _of(self, name: str) -> torch.Tensor:
        return self.tensors[f"{_TRUNK}{name}.weight"]

    def _norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        eps = self.config["rms_norm_eps"] if eps is None else eps
        return F.rms_norm(x, x.shape[-1:], self._of(name), eps)

    def _mixed(self, closed: list[torch.Tensor], running: torch.Tensor, name: str) -> torch.Tensor:
        sources = torch.stack([*closed, running], dim=1)
        scores = self._norm(sources, f"{name}_norm") @ self._of(f"{name}_proj")[0]
        return (scores.softmax(1)[..., None] * sources).sum(1)

    def _attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        name = f"layers.{layer}.self_attn."
        if layer + 1 in self.config["linear_attn_config"]["kda_layers"]:
            return self._delta(x, name)
        c, heads = self.config, self.config["num_attention_heads"]
        nope, rank = c["qk_nope_head_dim"], c["kv_lora_rank"]
        low = self._norm(x @ self._of(f"{name}q_a_proj").T, f"{name}q_a_layernorm", 1e-6)
        q = (low @ self._of(f"{name}q_b_proj").T).view(len(x), heads, -1)
        down = x @ self._of(f"{name}kv_a_proj_with_mqa").T
        latent = self._norm(down[:, :rank], f"{name}kv_a_layernorm", 1e-6)
        both = (latent @ self._of(f"{name}kv_b_proj").T).view(len(x), heads, -1)
        k = torch.cat((both[..., :nope], down[:, None, rank:].expand(-1, heads, -1)), dim=-1)
        scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
        future = torch.full((len(x), len(x)), -torch.inf).triu(1)
        out = torch.einsum("hts,shd->thd", (scores + future).softmax(-1), both[..., nope:])
        gate = (x @ self._of(f"{name}g_proj").T).sigmoid()
        return (out.flatten(1) * gate) @ self._of(f"{name}o_proj").T

    def _delta(self, x: torch.Tensor, name: str) -> torch.Tensor:
        linear = self.config["linear_attn_config"]
        heads, size = linear["num_heads"], linear["head_dim"]
        q, k, v = (self._convolved(x, name, part).view(len(x), heads, size) for part in "qkv")
        q, k = (F.normalize(y, dim=-1) for y in (q, k))
        decay = x @ self._of(f"{name}f_a_proj").T @ self._of(f"{name}f_b_proj").T
        decay = (decay + self.tensors[f"{_TRUNK}{name}dt_bias"]).view(len(x), heads, size)
        rates = self.tensors[f"{_TRUNK}{name}A_log"][:heads].exp()
        keeps = (linear["gate_lower_bound"] * (rates[:, None] * decay).sigmoid()).exp()
        strength = (x @ self._of(f"{name}b_proj").T).sigmoid()
        state, rows = torch.zeros(heads, size, size), []
        for t in range(len(x)):
            state = state * keeps[t][..., None]
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], error * strength[t][:, None])
            rows.append(torch.einsum("hkv,hk->hv", state, q[t]) * size**-0.5)
        gate = (x @ self._of(f"{name}g_proj").T).view(len(x), heads, size).sigmoid()
        out = self._norm(torch.stack(rows), f"{name}o_norm") * gate
        return out.flatten(1) @ self._of(f"{name}o_proj").T

    def _convolved(self, x: torch.Tensor, name: str, part: str) -> torch.Tensor:
        raw = F.pad((x @ self._of(f"{name}{part}_proj").T).T, (3, 0))
        weight = self._of(f"{name}{part}_conv1d")
        return F.silu(F.conv1d(raw[None], weight, groups=len(weight))[0].T)

    def _feed(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        c, name = self.config, f"layers.{layer}."
        if layer < c["first_k_dense_replace"]:
            return self._mlp(x, *(f"{name}mlp.{part}_proj" for part in ("gate", "up", "down")))
        moe = f"{name}block_sparse_moe."
        scores = (x @ self._of(f"{moe}gate").T).sigmoid()
        bias = self.tensors[f"{_TRUNK}{moe}gate.e_score_correction_bias"]
        ids = (scores + bias).topk(c["num_experts_per_token"]).indices
        weights = scores.gather(1, ids)
        weights = weights / weights.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        latent = x @ self._of(f"{moe}routed_expert_down_proj").T
        sums = torch.zeros_like(latent)
        for t, row in enumerate(ids.tolist()):
            for place, e in enumerate(row):
                parts = (f"{moe}experts.{e}.{part}" for part in ("w1", "w3", "w2"))
                sums[t] += weights[t, place] * self._mlp(latent[t], *parts)
        routed = self._norm(sums, f"{moe}routed_expert_norm")
        shared = (f"{moe}shared_experts.{part}_proj" for part in ("gate", "up", "down"))
        return routed @ self._of(f"{moe}routed_expert_up_proj").T + self._mlp(x, *shared)

    def _mlp(self, x: torch.Tensor, gate: str, up: str, down: str) -> torch.Tensor:
        b, c = (self.config[f"activation_situ_{name}"] for name in ("beta", "linear_beta"))
        g, u = x @ self._of(gate).T, x @ self._of(up).T
        return (b * (g / b).tanh() * g.sigmoid() * c * (u / c).tanh()) @ self._of(down).T
