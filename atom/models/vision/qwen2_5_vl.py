"""Qwen2.5-VL's tower: most layers attend within windows of an image.

Source of names and computation: transformers' `qwen2_5_vl`.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.models.config.model_config import PretrainedConfig
from atom.models.llama import SILU
from atom.models.vision.encoder import VisionLinear
from atom.models.vision.qwen_layers import (
    QwenImageEncoder,
    QwenVisionBlock,
    places_of_patches,
    turns_of,
)

_EPS = 1e-6


class VisionRMSNorm(nn.Module):
    def __init__(self, size: int, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, _EPS)


class Qwen25VisionMLP(nn.Module):
    def __init__(self, size: int, intermediate: int, context: LayerContext) -> None:
        super().__init__()
        self.gate_proj = VisionLinear(size, intermediate, context)
        self.up_proj = VisionLinear(size, intermediate, context)
        self.down_proj = VisionLinear(intermediate, size, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Qwen25PatchMerger(nn.Module):
    """From a square of patches to a row of the text network."""

    def __init__(self, size: int, merge: int, output: int, context: LayerContext) -> None:
        super().__init__()
        self._merged = size * merge**2
        self.ln_q = VisionRMSNorm(size, context)
        self.mlp = nn.ModuleDict(
            {
                "0": VisionLinear(self._merged, self._merged, context),
                "2": VisionLinear(self._merged, output, context),
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N, size] -> [..., N / merge^2, output]."""
        rows = self.ln_q(x).view(*x.shape[:-2], -1, self._merged)
        out: torch.Tensor = self.mlp["2"](F.gelu(self.mlp["0"](rows)))
        return out


class Qwen25ImageEncoder(QwenImageEncoder):
    """Tower and merger, by their names in the checkpoint.

    Raises:
        ConfigError: for what it cannot compute.
    """

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        vision = config.vision_config
        super().__init__(vision, context, bias=False)
        if vision.hidden_act not in SILU:
            raise ConfigError(f"hidden_act={vision.hidden_act!r} of the vision tower; only silu is")
        # Squares along a side of a window.
        self._window: int = vision.window_size // self._merge // vision.patch_size
        if self._window < 1:
            raise ConfigError(
                f"window_size={vision.window_size} of the vision tower is smaller than the "
                f"{self._merge} by {self._merge} patches of a token"
            )
        size = vision.hidden_size
        self._whole = frozenset(vision.fullatt_block_indexes)
        self._blocks = tuple(
            QwenVisionBlock(
                vision,
                [VisionRMSNorm(size, context) for _ in range(2)],
                Qwen25VisionMLP(size, vision.intermediate_size, context),
                context,
            )
            for _ in range(vision.depth)
        )
        self.blocks = nn.ModuleList(self._blocks)
        output = config.get_text_config().hidden_size
        self.merger = Qwen25PatchMerger(size, self._merge, output, context)

    def forward(self, pixels: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Patches [N, 1 or frames, channels, patch, patch] of a grid of (times, rows, columns) ->
        [N / merge^2, output].
        """
        times, height, width = grid
        order, parts = self._windows(height, width, pixels.device)
        in_square = self._merge**2
        places = places_of_patches(height, width, self._merge, pixels.device)
        places = places.view(-1, in_square, 2)[order].flatten(0, 1)
        turns = turns_of(places, self._head_dim)
        x = self.patch_embed(pixels).view(times, len(order), in_square, -1)
        x = x[:, order].flatten(1, 2)
        every = [(1, height * width)]
        for i, block in enumerate(self._blocks):
            x = block(x, turns, every if i in self._whole else parts)
        rows: torch.Tensor = self.merger(x)
        out = torch.empty_like(rows)
        out[:, order] = rows
        return out.flatten(0, 1)

    def _windows(
        self, height: int, width: int, device: torch.device
    ) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """The squares of a frame, those of a window together and windows of a size together; and
        how many windows have how many patches.
        """
        rows, columns = height // self._merge, width // self._merge
        own = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).view(-1, 2)
        row, column = (own // self._window).unbind(1)
        window = row * (-(-columns // self._window)) + column
        sizes = torch.bincount(window)
        order = torch.argsort(sizes[window] * len(sizes) + window, stable=True)
        counts = Counter(sizes.tolist())
        patches = self._merge**2
        parts = [(count, length * patches) for length, count in sorted(counts.items())]
        return order.to(device), parts
