"""What the towers of Qwen's vision models have in common.

Patches come as their processor cuts them: a frame's squares of `merge` by `merge` patches, row by
row, and within a square its patches row by row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.models.config.model_config import PretrainedConfig
from atom.models.vision.encoder import ImageEncoder, VisionLinear, attend

_THETA = 10_000.0
# Rows of the text network that the published processors make of one image or video, at most.
_MOST_TOKENS = 16384


class FramePatchProjection(nn.Module):
    """A convolution over some frames whose stride is its size: a product with each patch.

    Its weight is stored as that of a convolution, [size, channels, frames, patch, patch].
    """

    def __init__(
        self, size: int, channels: int, frames: int, patch: int, context: LayerContext, bias: bool
    ) -> None:
        super().__init__()
        self.weight = context.empty(size, channels, frames, patch, patch)
        self.bias = context.empty(size) if bias else None

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Of frames [N, frames, channels, patch, patch], or of one that stands for all of them
        [N, 1, channels, patch, patch] -> [N, size].
        """
        if patches.shape[1] == 1:
            weight = self.weight.sum(2, dtype=torch.float32).to(self.weight.dtype)
        else:
            weight = self.weight.transpose(1, 2)
        return F.linear(patches.flatten(1), weight.flatten(1), self.bias)


class QwenPatchEmbedding(nn.Module):
    def __init__(self, config: PretrainedConfig, context: LayerContext, bias: bool) -> None:
        super().__init__()
        sizes = config.in_channels, config.temporal_patch_size, config.patch_size
        self.proj = FramePatchProjection(config.hidden_size, *sizes, context, bias)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(patches)
        return out


class QwenVisionAttention(nn.Module):
    """Rotates the halves of each head, then attends within given ranges of a frame's rows."""

    def __init__(self, size: int, heads: int, context: LayerContext) -> None:
        super().__init__()
        self.qkv = VisionLinear(size, 3 * size, context)
        self.proj = VisionLinear(size, size, context)
        self._heads = heads

    def forward(
        self, x: torch.Tensor, turns: torch.Tensor, parts: list[tuple[int, int]]
    ) -> torch.Tensor:
        """[frames, N, size] -> the same shape.

        Args:
            turns: [N, d], cosines then sines of each pair.
            parts: (number, length) of ranges, in order, which cover a frame; those of neighbours
                with the same length together.
        """
        qkv = self.qkv(x).view(*x.shape[:2], 3, self._heads, -1)
        q, k, v = qkv.unbind(2)
        q, k = _rotate(q, turns), _rotate(k, turns)
        done, attended = 0, []
        for count, length in parts:
            end = done + count * length
            own = (t[:, done:end].reshape(-1, length, *t.shape[2:]) for t in (q, k, v))
            attended.append(attend(*own).view(len(x), end - done, -1))
            done = end
        out: torch.Tensor = self.proj(torch.cat(attended, dim=1))
        return out


class QwenVisionBlock(nn.Module):
    """Attention and MLP with pre-norms."""

    def __init__(
        self,
        config: PretrainedConfig,
        norms: list[nn.Module],
        mlp: nn.Module,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn = QwenVisionAttention(config.hidden_size, config.num_heads, context)
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, turns: torch.Tensor, parts: list[tuple[int, int]]
    ) -> torch.Tensor:
        """As `QwenVisionAttention`."""
        x = x + self.attn(self.norm1(x), turns, parts)
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class QwenImageEncoder(ImageEncoder):
    """Patches of frames, and what all layers need to know of them.

    Raises:
        ConfigError: when heads do not divide into pairs of rows and columns.
    """

    mrope = True

    def __init__(self, config: PretrainedConfig, context: LayerContext, bias: bool) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        if size % (4 * heads):
            raise ConfigError(
                f"a vision tower of {heads} heads and hidden_size={size}: heads rotate by rows and "
                f"by columns, so their size must be a multiple of 4"
            )
        self._head_dim = size // heads
        self._merge: int = config.spatial_merge_size
        self._patch = config.in_channels, config.patch_size, config.patch_size
        self._max_model_len = context.max_model_len
        self.patch_embed = QwenPatchEmbedding(config, context, bias)

    def largest_input(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        along = max(int(min(_MOST_TOKENS, self._max_model_len) ** 0.5), 1) * self._merge
        return (along**2, 1, *self._patch), (1, along, along)


def _rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """[frames, N, heads, d]."""
    cos, sin = turns[:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def places_of_patches(rows: int, columns: int, merge: int, device: torch.device) -> torch.Tensor:
    """[rows * columns, 2] int64, the row and the column of each patch of a frame."""
    grid = torch.cartesian_prod(
        torch.arange(rows, device=device), torch.arange(columns, device=device)
    )
    squares = grid.view(rows // merge, merge, columns // merge, merge, 2)
    return squares.transpose(1, 2).reshape(-1, 2)


def turns_of(places: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[N, head_dim], cosines then sines: half of the pairs turn by rows, the others by columns.

    Args:
        places: [N, 2], rows and columns.
    """
    half = head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=places.device) / half
    angles = (places[..., None] * (1.0 / _THETA**exponents)).flatten(1)
    return torch.cat((angles.cos(), angles.sin()), dim=1)
