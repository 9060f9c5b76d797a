"""Qwen3-VL's tower: learned positions, and rows of several of its layers (deepstack).

Source of names and computation: transformers' `qwen3_vl`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.models.config.model_config import PretrainedConfig
from atom.models.vision.encoder import VisionLinear, VisionNorm, feed, gelu_of
from atom.models.vision.qwen_layers import (
    QwenImageEncoder,
    QwenVisionBlock,
    places_of_patches,
    turns_of,
)

_EPS = 1e-6


class Qwen3VisionPositions(nn.Module):
    """A square table of learned positions, resized to a frame's grid."""

    def __init__(self, places: int, size: int, context: LayerContext) -> None:
        super().__init__()
        self._side = int(places**0.5)
        self.weight = context.empty(places, size)

    def forward(self, rows: int, columns: int, merge: int) -> torch.Tensor:
        """[rows * columns, size], a square of patches together."""
        side = self._side
        table = self.weight[: side * side].view(side, side, -1).permute(2, 0, 1)[None].float()
        resized = F.interpolate(table, (rows, columns), mode="bilinear", align_corners=True)[0]
        squares = resized.view(len(resized), rows // merge, merge, columns // merge, merge)
        return squares.permute(1, 3, 2, 4, 0).flatten(0, 3).to(self.weight.dtype)


class Qwen3VisionMLP(nn.Module):
    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        size, intermediate = config.hidden_size, config.intermediate_size
        self.linear_fc1 = VisionLinear(size, intermediate, context)
        self.linear_fc2 = VisionLinear(intermediate, size, context)
        self._gelu = gelu_of(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return feed(x, self.linear_fc1, self.linear_fc2, self._gelu)


class Qwen3PatchMerger(nn.Module):
    """From a square of patches to a row of the text network.

    Args:
        norms_square: whether the norm is over a whole square; else over each patch.
    """

    def __init__(
        self, config: PretrainedConfig, output: int, context: LayerContext, *, norms_square: bool
    ) -> None:
        super().__init__()
        self._merged = config.hidden_size * config.spatial_merge_size**2
        self._norms_square = norms_square
        size = self._merged if norms_square else config.hidden_size
        self.norm = VisionNorm(size, _EPS, context)
        self.linear_fc1 = VisionLinear(self._merged, self._merged, context)
        self.linear_fc2 = VisionLinear(self._merged, output, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[frames, N, size] -> [frames * N / merge^2, output]."""
        if self._norms_square:
            rows = self.norm(x.reshape(-1, self._merged))
        else:
            rows = self.norm(x).view(-1, self._merged)
        return feed(rows, self.linear_fc1, self.linear_fc2, "none")


class Qwen3ImageEncoder(QwenImageEncoder):
    """Tower and mergers, by their names in the checkpoint.

    A row has what takes the place of a token's embedding, then what is added to the outputs of the
    first layers of the text network, as `ImageRows` has it.

    Raises:
        ConfigError: for what it cannot compute.
    """

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        vision, text = config.vision_config, config.get_text_config()
        super().__init__(vision, context, bias=True)
        # Older configurations of families without it do not state it.
        deep = list(getattr(vision, "deepstack_visual_indexes", None) or ())
        if any(not 0 <= i < vision.depth for i in deep) or len(deep) > text.num_hidden_layers:
            raise ConfigError(
                f"deepstack_visual_indexes={deep} of a vision tower with {vision.depth} layers and "
                f"a text network with {text.num_hidden_layers}"
            )
        self._deep = tuple(deep)
        self.num_deep = len(deep)
        size = vision.hidden_size
        self.pos_embed = Qwen3VisionPositions(vision.num_position_embeddings, size, context)
        self._blocks = tuple(
            QwenVisionBlock(
                vision,
                [VisionNorm(size, _EPS, context) for _ in range(2)],
                Qwen3VisionMLP(vision, context),
                context,
            )
            for _ in range(vision.depth)
        )
        self.blocks = nn.ModuleList(self._blocks)
        output = text.hidden_size
        self.merger = Qwen3PatchMerger(vision, output, context, norms_square=False)
        self._deep_mergers = tuple(
            Qwen3PatchMerger(vision, output, context, norms_square=True) for _ in deep
        )
        self.deepstack_merger_list = nn.ModuleList(self._deep_mergers)

    def forward(self, pixels: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Patches [N, 1 or frames, channels, patch, patch] of a grid of (times, rows, columns) ->
        [N / merge^2, (1 + deep layers) * output].
        """
        times, height, width = grid
        places = places_of_patches(height, width, self._merge, pixels.device)
        turns, whole = turns_of(places, self._head_dim), [(1, height * width)]
        x = self.patch_embed(pixels).view(times, height * width, -1)
        x = x + self.pos_embed(height, width, self._merge)
        deep = []
        for i, block in enumerate(self._blocks):
            x = block(x, turns, whole)
            if i in self._deep:
                deep.append(self._deep_mergers[self._deep.index(i)](x))
        return torch.cat([self.merger(x), *deep], dim=1)
