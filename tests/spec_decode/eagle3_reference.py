"""An Eagle3 draft in plain torch, dense and without a cache, read from the format's description.

Every call computes the whole sequence anew. It shares no code with the package.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Tensors = dict[str, torch.Tensor]


class ReferenceDraft:
    """Args:
    raw: the draft's config.json. tensors: its checkpoint, with `midlayer.` names.
    embed, head: the target's weights, for what the draft does not bring.
    """

    def __init__(
        self, raw: dict[str, Any], tensors: Tensors, embed: torch.Tensor, head: torch.Tensor
    ) -> None:
        self.raw = {**raw.get("eagle_config", {}), **raw}
        self.tensors = tensors
        self.embed = tensors.get("embed_tokens.weight", embed)
        self.head = tensors.get("lm_head.weight", head)

    def fuse(self, aux: list[torch.Tensor]) -> torch.Tensor:
        if self.raw.get("fc_norm"):
            aux = [self.norm(a, f"fc_norm.{i}") for i, a in enumerate(aux)]
        states = torch.cat(aux, -1)
        if self.raw.get("norm_before_fc"):
            states = self.norm(states, "input_norm")
        return states @ self.tensors["fc.weight"].T

    def forward(
        self, next_tokens: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows 0..T-1 of one sequence -> of every row what the head reads, and the next step."""
        embeds = self.norm(self.embed[next_tokens], "midlayer.input_layernorm")
        normed = self.norm(hidden, "midlayer.hidden_norm")
        x = torch.cat([embeds, normed], -1)
        residual = normed if self.raw.get("norm_before_residual") else hidden
        attention = self.mla if self.raw.get("kv_lora_rank") else self.mha
        residual = residual + attention(x)
        y = self.norm(residual, "midlayer.post_attention_layernorm")
        gate, up = self.linear(y, "mlp.gate_proj"), self.linear(y, "mlp.up_proj")
        total = residual + self.linear(F.silu(gate) * up, "mlp.down_proj")
        normed = self.norm(total, "norm")
        return normed, normed if self.raw.get("norm_output") else total

    def propose(
        self, next_tokens: list[int], fused: torch.Tensor, k: int
    ) -> tuple[list[int], torch.Tensor]:
        """Greedy chain of k target token ids after the last of `next_tokens`.

        With them the post-norm states [k, hidden] that they were chosen from.
        """
        tokens, hidden, drafts, states = list(next_tokens), fused, [], []
        for _ in range(k):
            post, fed = self.forward(torch.tensor(tokens), hidden)
            states.append(post[-1])
            drafts.append(self.to_target(int((post[-1] @ self.head.T).argmax())))
            tokens.append(drafts[-1])
            hidden = torch.cat([hidden, fed[-1:]])
        return drafts, torch.stack(states)

    def to_target(self, draft_id: int) -> int:
        d2t = self.tensors.get("d2t")
        return draft_id if d2t is None else draft_id + int(d2t[draft_id])

    def norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        eps = self.raw.get("rms_norm_eps", 1e-6) if eps is None else eps
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return x * scale * self.tensors[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = x @ self.tensors[f"midlayer.{name}.weight"].T
        bias = self.tensors.get(f"midlayer.{name}.bias")
        return out if bias is None else out + bias

    def mha(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.raw["num_attention_heads"]
        dim = self.raw.get("head_dim", self.raw["hidden_size"] // heads)
        q, k, v = (self.linear(x, f"self_attn.{part}_proj").view(len(x), -1, dim) for part in "qkv")
        cos, sin = self.rotation(len(x), dim)
        q, k = (
            a * cos + torch.cat([-a[..., dim // 2 :], a[..., : dim // 2]], -1) * sin for a in (q, k)
        )
        repeat = heads // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = self.attend(q, k, v, dim**-0.5)
        return self.linear(out, "self_attn.o_proj")

    def mla(self, x: torch.Tensor) -> torch.Tensor:
        raw, heads = self.raw, self.raw["num_attention_heads"]
        nope, rope = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
        if raw.get("q_lora_rank"):
            low = self.linear(x, "self_attn.q_a_proj")
            low = self.norm(low, "midlayer.self_attn.q_a_layernorm", 1e-6)
            q = self.linear(low, "self_attn.q_b_proj")
        else:
            q = self.linear(x, "self_attn.q_proj")
        q = q.view(len(x), heads, nope + rope)
        compressed = self.linear(x, "self_attn.kv_a_proj_with_mqa")
        latent = self.norm(
            compressed[:, : raw["kv_lora_rank"]], "midlayer.self_attn.kv_a_layernorm", 1e-6
        )
        k_rope = compressed[:, None, raw["kv_lora_rank"] :]
        expanded = self.linear(latent, "self_attn.kv_b_proj").view(len(x), heads, -1)
        cos, sin = (c[..., : rope // 2] for c in self.rotation(len(x), rope))

        def rotate(a: torch.Tensor) -> torch.Tensor:
            even, odd = a[..., 0::2], a[..., 1::2]
            return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

        q = torch.cat([q[..., :nope], rotate(q[..., nope:])], -1)
        k = torch.cat([expanded[..., :nope], rotate(k_rope).expand(-1, heads, -1)], -1)
        scaling = raw.get("rope_scaling") or {}
        mscale = 1.0
        if scaling.get("mscale_all_dim"):
            mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
        out = self.attend(q, k, expanded[..., nope:], (nope + rope) ** -0.5 * mscale**2)
        return self.linear(out, "self_attn.o_proj")

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[T, heads, d] each -> [T, heads * d_v], causal, within the window if there is one."""
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        rows = torch.arange(len(q))
        hidden = rows[None, :] > rows[:, None]
        window = self.raw.get("sliding_window")
        if window is not None and window > 0:
            hidden |= rows[None, :] <= rows[:, None] - window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)

    def rotation(self, length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, dim] of the draft's own rotation."""
        config = LlamaConfig(
            hidden_size=dim,
            num_attention_heads=1,
            head_dim=dim,
            max_position_embeddings=self.raw.get("max_position_embeddings", 2048),
            rope_theta=self.raw.get("rope_theta", 10000.0),
            rope_scaling=self.raw.get("rope_scaling"),
        )
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
        return cos[0, :, None], sin[0, :, None]
