"""What the engine asks of every causal language model."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from atom.model_ops.embedding import ParallelLMHead, VocabParallelEmbedding
from atom.model_ops.layernorm import RMSNorm
from atom.model_ops.metadata import ModelInput, ModelOutput
from atom.model_ops.weight_mapping import WeightMapping


class CausalLM(nn.Module, ABC):
    """A target model: hidden states for every token, logits for chosen rows."""

    @property
    @abstractmethod
    def weight_mapping(self) -> WeightMapping:
        """How the checkpoint's tensor names become this model's parameters."""

    @property
    @abstractmethod
    def token_embedding(self) -> VocabParallelEmbedding:
        """The input embedding, for a draft that shares it."""

    @property
    @abstractmethod
    def output_head(self) -> ParallelLMHead:
        """The module that makes the logits, for a draft that shares it."""

    @property
    @abstractmethod
    def final_norm(self) -> RMSNorm:
        """The norm between the last layer and the output head."""

    @abstractmethod
    def forward(self, model_input: ModelInput) -> ModelOutput:
        """Run all layers over T tokens, writing their keys and values to the KV cache."""

    @abstractmethod
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab], in the model's dtype."""

    @abstractmethod
    def set_aux_layer_ids(self, layer_ids: tuple[int, ...]) -> None:
        """Ask every later forward for hidden states between layers, in this order.

        Id i is the hidden state that enters decoder layer i (0 is the embedding's output); the
        number of layers is the output of the last one, before the final norm.

        Raises:
            ValueError: for an id outside that range.
        """

    @abstractmethod
    def default_aux_layer_ids(self) -> tuple[int, ...]:
        """The ids that a draft reads when its config names none."""


def check_aux_layer_ids(layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Refuse ids that name no hidden state of a model of `num_layers` layers.

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
