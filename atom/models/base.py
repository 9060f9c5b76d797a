"""What the engine asks of every causal language model."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from atom.model_ops.attention_mha import Attention
from atom.model_ops.metadata import ModelInput, ModelOutput
from atom.model_ops.weight_mapping import WeightMapping


class CausalLM(nn.Module, ABC):
    """A target model: hidden states for every token, logits for chosen rows."""

    @property
    @abstractmethod
    def weight_mapping(self) -> WeightMapping:
        """How the checkpoint's tensor names become this model's parameters."""

    @abstractmethod
    def forward(self, model_input: ModelInput) -> ModelOutput:
        """Run all layers over T tokens, writing their keys and values to the KV cache."""

    @abstractmethod
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab], in the model's dtype."""


def attention_layers(model: nn.Module) -> dict[int, Attention]:
    """The attention modules in the order of their layers."""
    modules = [m for m in model.modules() if isinstance(m, Attention)]
    return dict(enumerate(modules))
