"""A block drafter in plain torch, dense, in float64 and without a cache, read from the formats'
descriptions. It shares no code with the package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Yarn:
    """Frequencies of a context that is `factor` times as long as the `original` one: those that
    turn more than `fast` times within it stay, those that turn less than `slow` times are divided.

    Attributes:
        amplitude: of cosines and sines.
    """

    factor: float
    original: int
    fast: float
    slow: float
    amplitude: float = 1.0

    def stretch(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        """The inverse frequencies [d / 2]."""
        size = 2 * len(inverse)

        def place(turns: float) -> float:
            return size * math.log(self.original / (turns * math.tau)) / (2 * math.log(theta))

        low, high = max(math.floor(place(self.fast)), 0), min(math.ceil(place(self.slow)), size - 1)
        share = ((torch.arange(len(inverse)).double() - low) / (high - low)).clamp(0, 1)
        return inverse * (1 - share) + inverse / self.factor * share


@dataclass(frozen=True)
class Meaning:
    """What a config means, said by whoever wrote the config of a test.

    Attributes:
        windows, causal: of each layer; a window of 0 is none.
        anchored: row j drafts the token after its position.
        taps: of the convolutions around sublayers; 0 without.
        top_k: of the selector; 0 without.
        markov: the kind of Markov head; "" without.
        yarn: how positions are stretched; None if they are not.
    latents: attention is to latents, and names are those of Kimi-K3's draft.
    """

    windows: tuple[int, ...] = (0, 0)
    causal: tuple[bool, ...] = (False, False)
    anchored: bool = False
    taps: int = 0
    top_k: int = 0
    markov: str = ""
    interleaved: bool = False
    yarn: Yarn | None = None
    latents: bool = False
    scales: dict[str, float] = field(default_factory=dict)


# Of Kimi-K3's draft, and of the others.
LATENT_NAMES = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}


class BlockReference:
    """Args:
    layer: sizes of the layers, by their names in configs. tensors: the checkpoint.
    embed, head: the target's weights, for what the draft does not bring.
    """

    def __init__(
        self,
        layer: dict[str, Any],
        meaning: Meaning,
        tensors: Tensors,
        embed: torch.Tensor,
        head: torch.Tensor,
        block_size: int,
        mask_token: int,
    ) -> None:
        self.layer, self.meaning = layer, meaning
        self.block_size, self.mask_token = block_size, mask_token
        self.tensors = {k: v.double() if v.is_floating_point() else v for k, v in tensors.items()}
        if meaning.latents:
            del self.tensors["embed_tokens.weight"]  # copies of the target's
            for name, usual in LATENT_NAMES.items():
                self.tensors[f"{usual}.weight"] = self.tensors[f"{name}.weight"]
        self.embed = self.tensors.get("embed_tokens.weight", embed.double())
        self.head = self.tensors.get("lm_head.weight", head.double())

    def scores(
        self, aux: list[torch.Tensor], anchor: int, chosen: list[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """The scores [drafts, draft vocabulary] after a context of aux hidden states [T, hidden]
        each, and the target ids that they are highest for.

        Args:
            chosen: the drafts along which it goes; the best ones when left out.
        """
        states, at = self.block(aux, anchor), 0 if self.meaning.anchored else 1
        scales = self.meaning.scales
        unary = states @ self.head.T * scales.get("output_multiplier", 1)
        if cap := scales.get("final_logit_softcapping"):
            unary = cap * torch.tanh(unary / cap)
        rows, tokens, carried, previous = [], [], None, anchor
        for j in range(at, self.block_size if chosen is None else at + len(chosen)):
            row, carried = self.path(unary[j], states[j], previous, carried)
            rows.append(row)
            best = int(row.argmax())
            d2t = self.tensors.get("d2t")
            tokens.append(best if d2t is None else best + int(d2t[best]))
            previous = tokens[-1] if chosen is None else chosen[j - at]
        return torch.stack(rows), tokens

    def path(
        self, row: torch.Tensor, state: torch.Tensor, previous: int, carried: Any
    ) -> tuple[torch.Tensor, Any]:
        t = self.tensors
        if self.meaning.top_k:
            best = row.topk(self.meaning.top_k).indices
            query = t["candidate_selector.predecessor_codebook"][previous] * (
                t["candidate_selector.hidden_projection.weight"] @ state
            )
            scores = torch.full_like(row, -math.inf)
            codes = t["candidate_selector.successor_codebook"][best]
            scores[best] = row[best] + codes @ query
            return scores, None
        if not self.meaning.markov:
            return row, None
        first, second = (t[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        vector = first[previous]
        if self.meaning.markov == "gated":
            gate = self.linear(torch.cat([state, vector]), "markov_head.gate_proj").sigmoid()
            vector = gate * vector
        if self.meaning.markov == "rnn":
            carried = torch.zeros_like(vector) if carried is None else carried
            joint = self.linear(torch.cat([carried, vector, state]), "markov_head.joint_proj")
            keep, new, vector = joint.chunk(3)
            carried = keep.sigmoid() * carried + (1 - keep.sigmoid()) * new.tanh()
            vector = vector.tanh()
        return row + second @ vector, carried

    def confidence(self, aux: list[torch.Tensor], anchor: int, drafts: list[int]) -> torch.Tensor:
        """Of each draft of a path, with the Markov head's vectors."""
        states = self.block(aux, anchor)[: len(drafts)]
        vectors = self.tensors["markov_head.markov_w1.weight"][[anchor, *drafts[:-1]]]
        logits = self.linear(torch.cat([states, vectors], -1), "confidence_head.proj")
        return logits[:, 0].sigmoid()

    def block(self, aux: list[torch.Tensor], anchor: int) -> torch.Tensor:
        """The block's states [rows, hidden] after the final norm."""
        features = torch.cat([a.double() for a in aux], -1) @ self.tensors["fc.weight"].T
        context = self.norm(features, "hidden_norm")
        tokens = [anchor] + [self.mask_token] * (self.block_size - 1)
        hidden = self.embed[tokens] * self.meaning.scales.get("input_embedding_scale", 1)
        for i in range(self.layer["num_hidden_layers"]):
            x = self.norm(hidden, f"layers.{i}.input_layernorm")
            hidden = hidden + self.around(
                x, f"layers.{i}.attention_conv", lambda y, i=i: self.attend(i, context, y)
            )
            x = self.norm(hidden, f"layers.{i}.post_attention_layernorm")
            hidden = hidden + self.around(
                x, f"layers.{i}.mlp_conv", lambda y, i=i: self.mlp(y, f"layers.{i}.mlp")
            )
        return self.norm(hidden, "norm")

    def around(self, x: torch.Tensor, name: str, sublayer: Any) -> torch.Tensor:
        """The sublayer between its convolutions, if there are any."""
        taps = self.meaning.taps
        if not taps:
            return sublayer(x)
        base = self.tensors[f"{name}.base_kernel"]
        made = self.linear(x, f"{name}.kernel_projection").view(len(x), 2, taps, -1)
        group = x.shape[1] // made.shape[-1]

        def convolve(which: int, z: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(z)
            for j in range(len(z)):
                for tap in range(min(taps, j + 1)):
                    factors = base[which, tap] + made[j, which, tap].repeat_interleave(group)
                    out[j] += factors * z[j - tap]
            return out

        return convolve(1, sublayer(convolve(0, x)))

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(F.silu(gate) * up, f"{name}.down_proj")

    def attend_latents(self, name: str, before: int, rows: torch.Tensor) -> torch.Tensor:
        sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        nope, rope, _, rank = (self.layer[size] for size in sizes)
        heads, x = self.layer["num_attention_heads"], rows[before:]
        low = self.norm(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm")
        q = self.linear(low, f"{name}.q_b_proj").view(len(x), heads, -1)
        q = torch.cat([q[..., :nope], self.rotate(q[..., nope:], before)], -1)
        down = self.linear(rows, f"{name}.kv_a_proj_with_mqa")
        latent = self.norm(down[:, :rank], f"{name}.kv_a_layernorm")
        both = self.linear(latent, f"{name}.kv_b_proj").view(len(rows), heads, -1)
        turned = self.rotate(down[:, None, rank:], 0).expand(-1, heads, -1)
        k = torch.cat([both[..., :nope], turned], -1)
        yarn = self.meaning.yarn
        scale = (nope + rope) ** -0.5
        if yarn is not None:
            scale *= (0.1 * math.log(yarn.factor) + 1) ** 2
        weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(-1)
        seen = torch.einsum("hqk,khd->qhd", weights, both[..., nope:])
        return self.linear(seen.flatten(1), f"{name}.o_proj")

    def attend(self, i: int, context: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        name, dim, before = f"layers.{i}.self_attn", self.layer["head_dim"], len(context)
        rows = torch.cat([context, x])
        if self.meaning.latents:
            return self.attend_latents(name, before, rows)
        q = self.linear(x, f"{name}.q_proj").view(len(x), -1, dim)
        k, v = (self.linear(rows, f"{name}.{n}_proj").view(len(rows), -1, dim) for n in "kv")
        q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k = self.rotate(q, before), self.rotate(k, 0)
        v = v * self.meaning.scales.get("attention_value_scale", 1)
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        at, keys = torch.arange(before, len(rows))[:, None], torch.arange(len(rows))
        hidden = torch.zeros(len(x), len(rows), dtype=torch.bool)
        if self.meaning.windows[i]:
            hidden |= keys <= at - self.meaning.windows[i]
        if self.meaning.causal[i]:
            hidden |= keys > at
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return self.linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{name}.o_proj")

    def rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        dim = x.shape[-1]
        theta = self.layer.get("rope_theta", 10000.0)
        inverse = theta ** (-torch.arange(0, dim, 2).double() / dim)
        yarn = self.meaning.yarn
        if yarn is not None:
            inverse = yarn.stretch(inverse, theta)
            x = x * yarn.amplitude
        angles = torch.arange(start, start + len(x)).double()[:, None] * inverse
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        if self.meaning.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.layer["rms_norm_eps"]
        return (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.tensors[f"{name}.weight"]
        )

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return out if bias is None else out + bias
