"""Multi-token prediction layers, used as draft model for their own checkpoint.

DeepSeek-V3 has them, and GLM-4.5 and later in the same form. Source of names: the checkpoints,
where these layers (`num_nextn_predict_layers`) follow the model's last layer and contain copies of
its embedding and head, and DeepSeek-V3's `README_WEIGHTS.md`, which calls both shared. Source of
the computation: arXiv 2412.19437, section 2.2, except for:

- `eh_proj` reads the embedding first, then the hidden state: as in published engines, and in the
  opposite order of the paper's formula.
- `hnorm` reads the model's hidden state after its final norm; in further draft steps, the state
  after `shared_head.norm`. SGLang's `deepseek_nextn` always did so; vLLM changed to it from the
  state before the norm, for higher acceptance (vllm-project/vllm pull requests 45895 and 47448).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from atom.model_ops.attention.metadata import ModelInput
from atom.model_ops.embedding import ParallelLMHead, VocabParallelEmbedding
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import ResidualRMSNorm, RMSNorm
from atom.model_ops.linear import ReplicatedLinear
from atom.model_ops.quant.base import UnquantizedConfig
from atom.model_ops.quant.rounding import Rows
from atom.model_ops.rotary import AttentionInputs, Rotation
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.one_plus_norms import OnePlusNorms, add_one_to_norms
from atom.models.llama import LlamaForCausalLM


class MTPTarget(LlamaForCausalLM):
    """A model whose checkpoint may have prediction layers behind its last layer.

    Attributes:
        config: the text model's.
        prefix: of its tensor names in the checkpoint.
    """

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str = "") -> None:
        super().__init__(config, context, prefix)
        self.config = config
        self.prefix = prefix

    @property
    def mtp_layer_ids(self) -> range:
        """The ids of the prediction layers, which follow the last layer."""
        count = getattr(self.config, "num_nextn_predict_layers", None) or 0  # not in every config
        return range(self.config.num_hidden_layers, self.config.num_hidden_layers + count)

    @property
    def mtp_renames(self) -> tuple[tuple[str, str], ...]:
        """Prefixes of the prediction layers' tensors in the checkpoint, and of ours, which follow
        the last layer; none where the checkpoint has these.
        """
        return ()

    def mtp_prefix(self, layer_id: int) -> str:
        """The checkpoint's name of a prediction layer."""
        return f"{self.prefix}model.layers.{layer_id}"

    @property
    def weight_mapping(self) -> WeightMapping:
        """Without the prediction layers, which are loaded when they draft."""
        mapping = super().weight_mapping
        ignored = (rf"{self._layers}\.{i}\..*" for i in self.mtp_layer_ids)
        return dataclasses.replace(mapping, ignored=(*mapping.ignored, *ignored))

    @property
    def _layers(self) -> str:
        return rf"{re.escape(self.prefix)}model\.layers"


@runtime_checkable
class WritesKV(Protocol):
    """An attention that can write the KV cache alone."""

    def write_kv(self, x: Rows, inputs: AttentionInputs) -> None: ...


@dataclass(frozen=True)
class MTPParts:
    """What a prediction layer has itself, the rest is the target's; and how it is stored.

    Attributes:
        is_plain: as numbers, whatever the checkpoint's quantisation is.
    """

    embed_tokens: bool = False
    head: bool = False
    is_plain: bool = False


class SharedHead(nn.Module):
    """The norm before the output head, and the head if it is not the target's."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.norm = ResidualRMSNorm(size, eps, context)


class MTPLayer(nn.Module):
    """A decoder layer of the target's kind, whose input projection combines a token with the hidden
    state before it.

    Attributes:
        parts: which parts it has itself.
    """

    def __init__(
        self, target: MTPTarget, layer_id: int, parts: MTPParts, context: LayerContext
    ) -> None:
        super().__init__()
        config, prefix = target.config, target.mtp_prefix(layer_id)
        plain = dataclasses.replace(context, quant=UnquantizedConfig())
        if parts.is_plain:
            context = plain
        decoder = target.layer_class(config, layer_id, context, prefix)
        # As in the checkpoint, where its modules are beside those of the prediction.
        for name, module in decoder.named_children():
            self.add_module(name, module)
        self.parts = parts
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(size, eps, context)
        self.hnorm = RMSNorm(size, eps, context)
        # Not quantised, even if the others of the layer are.
        self.eh_proj = ReplicatedLinear(2 * size, size, False, plain, f"{prefix}.eh_proj")
        self.shared_head = SharedHead(size, eps, context)
        embedding, head = target.token_embedding, target.output_head
        if parts.embed_tokens:
            embedding = VocabParallelEmbedding(
                config.vocab_size, size, context, f"{prefix}.embed_tokens"
            )
            self.embed_tokens = embedding
        if parts.head:
            head = ParallelLMHead(config.vocab_size, size, context, f"{prefix}.shared_head.head")
            self.shared_head.head = head
        # In tuples, so that they are not registered as submodules.
        self._decoder, self._embedding, self._head = (decoder,), (embedding,), (head,)

    def predict(self, rows: ModelInput, hidden: torch.Tensor, rotary: Rotation) -> torch.Tensor:
        """T rows, and hidden [T, hidden] -> [T, hidden], after the norm before the head."""
        (decoder,) = self._decoder
        x, residual = decoder.enter(self._join(rows, hidden), None)
        x, residual = decoder(x, residual, AttentionInputs(rows.positions, rows.attention, rotary))
        post_norm, _ = self.shared_head.norm.add(x, residual)
        return post_norm

    def write_kv(self, rows: ModelInput, hidden: torch.Tensor, rotary: Rotation) -> None:
        """Write the KV cache like `predict`, without computing its output."""
        (decoder,) = self._decoder
        x, _ = decoder.enter(self._join(rows, hidden), None)
        attention = decoder.self_attn
        assert isinstance(attention, WritesKV)
        attention.write_kv(x, AttentionInputs(rows.positions, rows.attention, rotary))

    def _join(self, rows: ModelInput, hidden: torch.Tensor) -> torch.Tensor:
        """T rows, and [T, hidden] -> [T, hidden], the decoder layer's input."""
        embeds = self._embedding[0](rows.input_ids)
        if rows.images is not None:
            embeds = rows.images.fill(embeds)
        parts = self.enorm(embeds), self.hnorm(hidden)
        joined: torch.Tensor = self.eh_proj(torch.cat(parts, dim=-1))
        return joined

    def compute_logits(self, post_norm: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32."""
        logits: torch.Tensor = self._head[0](post_norm)
        return logits

    def choose_token(self, post_norm: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R] int64, the most likely token ids."""
        return self._head[0].argmax(post_norm)


class PredictionLayers(nn.Module):
    """The prediction layers of a target; draft step i uses the output of layer i modulo their
    number.

    The row at position t combines the hidden state at t with token t + 1; its logits are for token
    t + 2. Every layer computes every row, so that each has the keys of all positions when it is
    used. In training, layer j > 0 read layer j - 1's output at the position before; here it reads
    the target's hidden state, since the former would have to be kept for every cached prefix. No
    published checkpoint has a second layer.
    """

    def __init__(self, target: MTPTarget, parts: Sequence[MTPParts], context: LayerContext) -> None:
        super().__init__()
        first = target.config.num_hidden_layers
        self._layers = {
            i: MTPLayer(target, i, part, context) for i, part in enumerate(parts, start=first)
        }
        # Nested as in the checkpoint, so that errors have the checkpoint's names.
        layers = nn.ModuleDict({str(i): layer for i, layer in self._layers.items()})
        self.model = nn.ModuleDict({"layers": layers})
        self._rotary = target.model.rotary
        self._target_mapping = target.weight_mapping
        self._renames = target.mtp_renames
        self._adds_one = isinstance(target, OnePlusNorms)
        self._prefix = target.prefix

    @property
    def weight_mapping(self) -> WeightMapping:
        """For the target's checkpoint; all tensors of other layers are ignored."""
        target = self._target_mapping
        if self._renames:
            begins = "|".join(re.escape(name) for name, _ in self._renames)
            others = rf"(?!({begins})).*"
            return dataclasses.replace(target, renames=self._renames, ignored=(others,))
        layers = rf"{re.escape(self._prefix)}model\.layers"
        ids = "|".join(str(i) for i in self._layers)
        ignored = [rf"(?!{layers}\.({ids})\.).*", r".*\.rotary_emb\.inv_freq"]
        for i, layer in self._layers.items():
            if not layer.parts.embed_tokens:
                ignored.append(rf"{layers}\.{i}\.embed_tokens\..*")
            if not layer.parts.head:
                ignored.append(rf"{layers}\.{i}\.shared_head\.head\..*")
        return dataclasses.replace(target, ignored=tuple(ignored))

    @property
    def dequantised_bytes(self) -> int:
        return 0

    def process_after_loading(self) -> None:
        """Norms are stored as the target's are."""
        if self._adds_one:
            add_one_to_norms(self)

    def forward(self, step: int, rows: ModelInput, hidden: torch.Tensor) -> torch.Tensor:
        """One causal pass, which writes the KV of every layer.

        Args:
            step: index of the draft token, from 0.
            rows: T of them, each with the token after its position.
            hidden: [T, hidden], the target's at the positions after its final norm, or the previous
                step's output.

        Returns:
            [T, hidden], for `compute_logits` and the next step.
        """
        outputs = [layer.predict(rows, hidden, self._rotary) for layer in self._layers.values()]
        return outputs[step % len(outputs)]

    def write_kv(self, rows: ModelInput, hidden: torch.Tensor) -> None:
        """Write the KV caches like `forward`; no layer depends on another."""
        for layer in self._layers.values():
            layer.write_kv(rows, hidden, self._rotary)

    def compute_logits(self, step: int, post_norm: torch.Tensor) -> torch.Tensor:
        """[R, hidden] of draft `step` -> [R, vocab]."""
        return self._layer(step).compute_logits(post_norm)

    def choose_token(self, step: int, post_norm: torch.Tensor) -> torch.Tensor:
        """[R, hidden] of draft `step` -> [R] int64, the most likely token ids."""
        return self._layer(step).choose_token(post_norm)

    def _layer(self, step: int) -> MTPLayer:
        return tuple(self._layers.values())[step % len(self._layers)]
