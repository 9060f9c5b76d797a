"""Multi-token prediction in plain torch, dense and without a cache, and checkpoints that have it.

Every call computes the whole sequence anew. It shares no code with the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def add_mtp_layers(folder: Path, prefix: str = "", own: tuple[str, ...] = ()) -> Tensors:
    """Add the layers that a checkpoint's config promises, with copies of embedding and head.

    `own` names those of `embed_tokens` and `shared_head.head` that are no copies.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    config = text_config(folder)
    first = config["num_hidden_layers"]
    generator = torch.Generator().manual_seed(7)
    last = {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}model.layers.{first - 1}.")
    }
    size = config["hidden_size"]
    for i in range(first, first + config["num_nextn_predict_layers"]):
        layer = f"{prefix}model.layers.{i}."
        shapes = {f"{layer}{n.split('.', prefix.count('.') + 3)[-1]}": t for n, t in last.items()}
        shapes = {name: tensor.shape for name, tensor in shapes.items()}
        shapes |= {f"{layer}{n}.weight": (size,) for n in ("enorm", "hnorm", "shared_head.norm")}
        shapes[f"{layer}eh_proj.weight"] = (size, 2 * size)
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            if len(shape) > 1:
                noise *= 1.5 / shape[-1] ** 0.5
            tensors[name] = 1 + 0.3 * noise if name.endswith("norm.weight") else noise
        copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        for name, copied in copies.items():
            copy = tensors[f"{prefix}{copied}.weight"].clone()
            if name in own:
                copy = torch.randn(copy.shape, generator=generator) / size**0.5
            tensors[f"{layer}{name}.weight"] = copy
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def remove_tensors(folder: Path, *endings: str) -> None:
    file = folder / "model.safetensors"
    kept = {name: t for name, t in load_file(file).items() if not name.endswith(endings)}
    save_file(kept, file, metadata={"format": "pt"})


def text_config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return dict(config.get("text_config", config))


class ReferenceMTP:
    """The prediction layers of a checkpoint folder with plain rotary positions."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.raw = text_config(folder)
        self.tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.count = self.raw["num_nextn_predict_layers"]

    def forward(self, step: int, next_tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Rows 0..T-1 of one sequence -> what `shared_head.norm` makes of every row."""
        self.layer = self.raw["num_hidden_layers"] + step % self.count
        embeds = self.get("embed_tokens")[next_tokens]
        x = torch.cat([self.norm(embeds, "enorm"), self.norm(hidden, "hnorm")], -1)
        x = self.linear(x, "eh_proj")
        x = x + self.attention(self.norm(x, "input_layernorm"))
        x = x + self.experts(self.norm(x, "post_attention_layernorm"))
        return self.norm(x, "shared_head.norm")

    def propose(
        self,
        next_tokens: list[int],
        hidden: torch.Tensor,
        k: int,
        choose: Callable[[torch.Tensor, int], int] = lambda logits, _: int(logits.argmax()),
    ) -> tuple[list[int], torch.Tensor]:
        """Chain of k tokens after the last of `next_tokens`, and their states.

        Args:
            choose: (logits [1, vocab], position in the text) -> token.
        """
        tokens, drafts, states = list(next_tokens), [], []
        for step in range(k):
            state = self.forward(step, tokens, hidden)[-1:]
            logits = state @ self.get("shared_head.head").T
            drafts.append(choose(logits, len(tokens) + 1))
            states.append(state)
            tokens, hidden = [*tokens, drafts[-1]], torch.cat([hidden, state])
        return drafts, torch.cat(states)

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[f"model.layers.{self.layer}.{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.get(name).T

    def norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        eps = self.raw["rms_norm_eps"] if eps is None else eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.get(name)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        raw, heads = self.raw, self.raw["num_attention_heads"]
        nope, rope, rank = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["kv_lora_rank"]
        low = self.norm(self.linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", 1e-6)
        q = self.linear(low, "self_attn.q_b_proj").view(len(x), heads, nope + rope)
        compressed = self.linear(x, "self_attn.kv_a_proj_with_mqa")
        latent = self.norm(compressed[:, :rank], "self_attn.kv_a_layernorm", 1e-6)
        expanded = self.linear(latent, "self_attn.kv_b_proj").view(len(x), heads, -1)
        k_rope = self.rotate(compressed[:, None, rank:]).expand(-1, heads, -1)
        q = torch.cat([q[..., :nope], self.rotate(q[..., nope:])], -1)
        k = torch.cat([expanded[..., :nope], k_rope], -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (nope + rope) ** -0.5
        weights = scores.masked_fill(self.unseen(x, low), -math.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, expanded[..., nope:])
        return self.linear(out.flatten(1), "self_attn.o_proj")

    def unseen(self, x: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """[T, T] bool: what each row does not attend to."""
        return torch.ones(len(x), len(x)).triu(1).bool()

    def rotate(self, a: torch.Tensor) -> torch.Tensor:
        """[T, heads, rope], pairs (x0, x1), (x2, x3), ... by position."""
        even, odd = self.turn(a[..., 0::2], a[..., 1::2])
        return torch.stack([even, odd], -1).flatten(-2)

    def turn(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Coordinates [T, heads, pairs], turned by position."""
        size, theta = 2 * x.shape[-1], self.raw["rope_parameters"]["rope_theta"]
        angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, size, 2) / size)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return x * cos - y * sin, y * cos + x * sin

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        """Row by row: the best groups by their two best experts, then the best experts."""
        raw, rows = self.raw, []
        scores = self.linear(x, "mlp.gate").sigmoid()
        bias = self.tensors[f"model.layers.{self.layer}.mlp.gate.e_score_correction_bias"]
        for row, score in zip(x, scores, strict=True):
            choice = (score + bias).view(raw["n_group"], -1)
            groups = choice.topk(2, -1).values.sum(-1).topk(raw["topk_group"]).indices
            allowed = torch.full_like(choice, -math.inf)
            allowed[groups] = choice[groups]
            chosen = allowed.flatten().topk(raw["num_experts_per_tok"]).indices
            weights = score[chosen] / score[chosen].sum() * raw["routed_scaling_factor"]
            outputs = [self.mlp(row, f"mlp.experts.{e}") for e in chosen.tolist()]
            routed = sum(w * out for w, out in zip(weights, outputs, strict=True))
            rows.append(routed + self.mlp(row, "mlp.shared_experts"))
        return torch.stack(rows)

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(F.silu(gate) * up, f"{name}.down_proj")


class SparseMTP(ReferenceMTP):
    """Prediction layers with an indexer of their own."""

    def unseen(self, x: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        raw, own, rope = self.raw, "self_attn.indexer", self.raw["qk_rope_head_dim"]
        size = raw["index_head_dim"]
        q = self.linear(low, f"{own}.wq_b").view(len(x), -1, size)
        bias = self.tensors[f"model.layers.{self.layer}.{own}.k_norm.bias"]
        k = self.linear(x, f"{own}.wk")
        k = F.layer_norm(k, (size,), self.get(f"{own}.k_norm"), bias, 1e-6)[:, None]
        turn = self.rotate if raw["model_type"] == "glm_moe_dsa" else self.rotate_halves
        q, k = (torch.cat([turn(a[..., :rope]), a[..., rope:]], -1) for a in (q, k))
        products = torch.einsum("qhd,kd->qhk", q, k[:, 0]).relu()
        scores = torch.einsum("qhk,qh->qk", products, self.linear(x, f"{own}.weights_proj"))
        future = super().unseen(x, low)
        best = scores.masked_fill(future, -math.inf).topk(min(raw["index_topk"], len(x))).indices
        return future | torch.ones_like(future).scatter(-1, best, False)

    def rotate_halves(self, a: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.turn(*a.chunk(2, -1)), -1)


class SharedChoiceMTP(SparseMTP):
    """Of which the rows of drafts attend to what the last row before them chose.

    Attributes:
        known: rows before the drafts' own.
    """

    known = 0

    def propose(self, next_tokens: list[int], *args: Any, **kwargs: Any) -> Any:
        self.known = len(next_tokens)
        return super().propose(next_tokens, *args, **kwargs)

    def unseen(self, x: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        unseen = super().unseen(x, low)
        # The last known row, whose choice is the same whatever follows it.
        unseen[self.known :] = unseen[self.known - 1]
        return unseen


class GroupedMTP(ReferenceMTP):
    """With grouped-query attention, whose heads rotate a first part in halves: GLM-4.5's."""

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        raw = self.raw
        q, k, v = (
            self.linear(x, f"self_attn.{name}_proj").view(len(x), -1, raw["head_dim"])
            for name in "qkv"
        )
        k, v = (a.repeat_interleave(q.shape[1] // a.shape[1], 1) for a in (k, v))
        scores = torch.einsum("qhd,khd->hqk", self.rotate(q), self.rotate(k))
        future = torch.ones(len(x), len(x)).triu(1).bool()
        scores = (scores * raw["head_dim"] ** -0.5).masked_fill(future, -math.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self.linear(out.flatten(1), "self_attn.o_proj")

    def rotate(self, a: torch.Tensor) -> torch.Tensor:
        rotated = int(a.shape[-1] * self.raw["rope_parameters"]["partial_rotary_factor"])
        halves = self.turn(*a[..., :rotated].chunk(2, -1))
        return torch.cat([*halves, a[..., rotated:]], -1)
