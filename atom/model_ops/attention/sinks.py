"""Attention sinks: learnt scores beside those of the keys, one for each query head."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import share_of
from atom.model_ops.weights import copy_weight


class HeadSinks(nn.Module):
    """A score more in each head's softmax, which takes weight from the keys and has no value.

    Source: Xiao et al., arXiv 2309.17453, section 3.3, without the value; gpt-oss.

    Args:
        num_heads: of all ranks.

    Attributes:
        weight: [heads of this rank] float32.
    """

    def __init__(self, num_heads: int, context: LayerContext) -> None:
        super().__init__()
        self._share = share_of(context.group, num_heads, "num_attention_heads")
        self.weight = replace(context, dtype=torch.float32).empty(self._share.size)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Load this rank's heads of all.

        Raises:
            ValueError: when the tensor does not have one number for each head.
        """
        share = self._share
        if tensor.shape != (share.total,):
            raise ValueError(
                f"the checkpoint holds shape {list(tensor.shape)}, the model wants [{share.total}]"
            )
        copy_weight(self.weight, tensor[share.start : share.start + share.size])
