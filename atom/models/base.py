"""The interface of causal language models."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from atom.model_ops.attention.metadata import ModelInput, ModelOutput
from atom.model_ops.embedding import OutputHead, VocabParallelEmbedding
from atom.model_ops.layernorm import RMSNorm
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.vision.encoder import ImageEncoder


class CausalLM(nn.Module, ABC):
    """A target model: hidden states for all tokens, logits for selected rows.

    Attributes:
        op_by_op: why its steps can be neither captured nor recorded; None if they can.
    """

    op_by_op: str | None = None

    @property
    @abstractmethod
    def weight_mapping(self) -> WeightMapping:
        """From the checkpoint's tensor names to this model's parameters."""

    @property
    @abstractmethod
    def token_embedding(self) -> VocabParallelEmbedding:
        """The input embedding, which a draft may share."""

    @property
    @abstractmethod
    def output_head(self) -> OutputHead:
        """The output head, which a draft may share."""

    @property
    @abstractmethod
    def final_norm(self) -> RMSNorm:
        """The norm between the last layer and the output head."""

    @property
    def image_encoder(self) -> ImageEncoder | None:
        """What makes rows of images; None when it reads none, or is built to read none."""
        return None

    @abstractmethod
    def forward(self, model_input: ModelInput) -> ModelOutput:
        """Run all layers on T tokens and write the KV cache."""

    @abstractmethod
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32."""

    @abstractmethod
    def set_aux_layer_ids(self, layer_ids: tuple[int, ...]) -> None:
        """Make later forward passes return hidden states between layers, in this order.

        Id i is the input of decoder layer i (0 is the embedding's output); i = number of layers is
        the output of the last layer, before the final norm.

        Raises:
            ValueError: for an id outside that range.
        """

    @abstractmethod
    def default_aux_layer_ids(self) -> tuple[int, ...]:
        """The ids for a draft whose config has none."""


def check_aux_layer_ids(layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Refuse ids outside 0 .. `num_layers`.

    Raises:
        ValueError: with the ids and the range.
    """
    if any(not 0 <= i <= num_layers for i in layer_ids):
        raise ValueError(
            f"aux layer ids {list(layer_ids)} must lie in 0..{num_layers} for a model of "
            f"{num_layers} layers"
        )


def spread_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """`(2, N // 2, N - 3)`, the published default; first, middle and last for under 7 layers.

    Raises:
        ValueError: for a single layer, which has no three distinct states.
    """
    if num_layers < 2:
        raise ValueError(
            f"no default aux layer ids for a model of {num_layers} layer(s); name them"
        )
    if num_layers < 7:
        return (0, num_layers // 2, num_layers)
    return (2, num_layers // 2, num_layers - 3)
