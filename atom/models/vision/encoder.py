"""What the towers of vision models have in common, and what an engine knows of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext

if TYPE_CHECKING:
    from atom.models.config.model_config import PretrainedConfig

_GELU = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}


class ImageEncoder(nn.Module, ABC):
    """From an image to the rows that take the place of its tokens' embeddings.

    Every rank has all of it: images are few, and nothing is exchanged for them.

    Attributes:
        mrope: whether tokens rotate by three numbers, as `ModelInput.mrope_shifts` says.
        num_deep: layers to whose outputs something is added, as `ImageRows` has it.
    """

    mrope: ClassVar[bool] = False
    num_deep: int = 0

    @abstractmethod
    def forward(self, pixels: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """The rows of one image.

        Args:
            pixels: in the model's dtype, normalised; of the shape that the processor makes.
            grid: as the processor made it.

        Returns:
            [tokens, hidden].
        """

    @abstractmethod
    def largest_input(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and grid of the largest image, for the memory profile."""


class VisionNorm(nn.Module):
    """LayerNorm with a bias."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(size)
        self.bias = context.empty(size)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return F.layer_norm(x, self.bias.shape, self.weight, self.bias, self._eps)


class PatchProjection(nn.Module):
    """A convolution whose stride is its size: a product with each patch.

    Its weight is stored as that of a convolution, [size, channels, patch, patch].
    """

    def __init__(self, size: int, channels: int, patch: int, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(size, channels, patch, patch)
        self.bias = context.empty(size)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[..., channels, patch, patch] -> [..., size]."""
        return F.linear(patches.flatten(-3), self.weight.flatten(1), self.bias)


def gelu_of(config: PretrainedConfig) -> str:
    """How the tower's GELU is approximated, as torch has it.

    Raises:
        ConfigError: for another activation.
    """
    name: str = config.hidden_act
    if name not in _GELU:
        raise ConfigError(f"hidden_act={name!r} of a vision tower is not supported; gelu is")
    return _GELU[name]


class VisionLinear(nn.Module):
    """A product, whole on every rank and in the model's dtype.

    Publishers leave towers out when they quantise. torch's product is the fastest for the hundreds
    of rows that an image has.
    """

    def __init__(
        self, in_features: int, out_features: int, context: LayerContext, bias: bool = True
    ) -> None:
        super().__init__()
        self.weight = context.empty(out_features, in_features)
        self.bias = context.empty(out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return F.linear(x, self.weight, self.bias)


def feed(x: torch.Tensor, first: VisionLinear, second: VisionLinear, gelu: str) -> torch.Tensor:
    """An MLP, [..., size] -> [..., size]."""
    out: torch.Tensor = second(F.gelu(first(x), approximate=gelu))
    return out


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each row attends to all of its image: three [n, T, heads, d] -> [n, T, heads * d].

    With fewer dimensions torch would keep all scores.
    """
    q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
