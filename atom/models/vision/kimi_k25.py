"""Kimi-K2.5's tower and projector: images of any size, with rotary and learned positions.

Source of names: the published checkpoint; of computation: transformers' `kimi_k25`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.models.config.model_config import PretrainedConfig
from atom.models.vision.encoder import (
    ImageEncoder,
    PatchProjection,
    VisionLinear,
    VisionNorm,
    attend,
    feed,
    gelu_of,
)

_CHANNELS = 3
_EPS = 1e-5
# The published processor's limits, of an image and of its side; then it is padded.
_MOST_PATCHES, _MOST_ALONG = 16384, 512


@dataclass(frozen=True)
class KimiVisionSizes:
    """The tower's numbers, which the published config names otherwise than transformers does.

    Attributes:
        merge: patches along a side that become one token.
        table: rows and columns of the learned positions.
        output: size of the text network's rows.
    """

    hidden: int
    heads: int
    layers: int
    intermediate: int
    patch: int
    merge: int
    table: tuple[int, int]
    output: int
    projector_eps: float
    theta: float

    @classmethod
    def of(cls, config: PretrainedConfig) -> KimiVisionSizes:
        """Raises:
        ConfigError: for what the tower cannot compute.
        """
        stated = config.vision_config.to_dict()

        def read(name: str, published: str) -> int:
            return int(stated.get(published) or stated[name])

        merge = stated["merge_kernel_size"]
        if merge[0] != merge[1]:
            raise ConfigError(f"merge_kernel_size={list(merge)} of the vision tower is no square")
        rope = stated.get("rope_parameters") or {}
        sizes = cls(
            read("hidden_size", "vt_hidden_size"),
            read("num_attention_heads", "vt_num_attention_heads"),
            read("num_hidden_layers", "vt_num_hidden_layers"),
            read("intermediate_size", "vt_intermediate_size"),
            int(stated["patch_size"]),
            int(merge[0]),
            (
                read("pos_emb_height", "init_pos_emb_height"),
                read("pos_emb_width", "init_pos_emb_width"),
            ),
            int(config.get_text_config().hidden_size),
            float(stated.get("projector_ln_eps") or config.projection_layer_norm_eps),
            float(rope.get("rope_theta", 10_000.0)),
        )
        if sizes.hidden % (4 * sizes.heads):
            raise ConfigError(
                f"a vision tower of {sizes.heads} heads and hidden_size={sizes.hidden}: heads "
                f"rotate by rows and by columns, so their size must be a multiple of 4"
            )
        return sizes


class KimiPositions(nn.Module):
    """A table of learned positions, resized to an image's grid."""

    def __init__(self, sizes: KimiVisionSizes, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(*sizes.table, sizes.hidden)

    def forward(self, height: int, width: int) -> torch.Tensor:
        """[height * width, hidden]."""
        if self.weight.shape[:2] == (height, width):
            return self.weight.flatten(0, 1)
        table = self.weight.permute(2, 0, 1)[None].float()
        resized = F.interpolate(table, (height, width), mode="bicubic", align_corners=False)
        return resized[0].flatten(1).T.to(self.weight.dtype)


class KimiPatchEmbedding(nn.Module):
    """Patches with the positions added."""

    def __init__(self, sizes: KimiVisionSizes, context: LayerContext) -> None:
        super().__init__()
        self.proj = PatchProjection(sizes.hidden, _CHANNELS, sizes.patch, context)
        self.pos_emb = KimiPositions(sizes, context)

    def forward(self, patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
        out: torch.Tensor = self.proj(patches) + self.pos_emb(height, width)
        return out


class KimiVisionMLP(nn.Module):
    def __init__(self, sizes: KimiVisionSizes, gelu: str, context: LayerContext) -> None:
        super().__init__()
        self.fc0 = VisionLinear(sizes.hidden, sizes.intermediate, context)
        self.fc1 = VisionLinear(sizes.intermediate, sizes.hidden, context)
        self._gelu = gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return feed(x, self.fc0, self.fc1, self._gelu)


class KimiVisionBlock(nn.Module):
    """Attention and MLP with pre-norms; neighbouring elements of a head rotate together."""

    def __init__(self, sizes: KimiVisionSizes, gelu: str, context: LayerContext) -> None:
        super().__init__()
        self.norm0 = VisionNorm(sizes.hidden, _EPS, context)
        self.norm1 = VisionNorm(sizes.hidden, _EPS, context)
        self.wqkv = VisionLinear(sizes.hidden, 3 * sizes.hidden, context)
        self.wo = VisionLinear(sizes.hidden, sizes.hidden, context)
        self.mlp = KimiVisionMLP(sizes, gelu, context)
        self._heads = sizes.heads

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, hidden]; `turns` [N, 1, d / 2] complex."""
        q, k, v = self.wqkv(self.norm0(x)).view(len(x), 3, self._heads, -1).unbind(1)
        q, k = _rotate(q, turns), _rotate(k, turns)
        x = x + self.wo(attend(q[None], k[None], v[None])[0])
        out: torch.Tensor = x + self.mlp(self.norm1(x))
        return out


class KimiVisionEncoder(nn.Module):
    def __init__(
        self, config: PretrainedConfig, sizes: KimiVisionSizes, context: LayerContext
    ) -> None:
        super().__init__()
        gelu = gelu_of(config.vision_config)
        self.blocks = nn.ModuleList(
            KimiVisionBlock(sizes, gelu, context) for i in range(sizes.layers)
        )
        self.final_layernorm = VisionNorm(sizes.hidden, _EPS, context)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, turns)
        out: torch.Tensor = self.final_layernorm(x)
        return out


class KimiVisionTower(nn.Module):
    def __init__(
        self, config: PretrainedConfig, sizes: KimiVisionSizes, context: LayerContext
    ) -> None:
        super().__init__()
        self.patch_embed = KimiPatchEmbedding(sizes, context)
        self.encoder = KimiVisionEncoder(config, sizes, context)


class KimiProjector(nn.Module):
    """From a square of patches to a row of the text network."""

    def __init__(self, sizes: KimiVisionSizes, context: LayerContext) -> None:
        super().__init__()
        merged = sizes.hidden * sizes.merge**2
        self.pre_norm = VisionNorm(sizes.hidden, sizes.projector_eps, context)
        self.proj = nn.ModuleDict(
            {
                "0": VisionLinear(merged, merged, context),
                "2": VisionLinear(merged, sizes.output, context),
            }
        )

    def forward(self, squares: torch.Tensor) -> torch.Tensor:
        """[T, merge * merge, hidden] -> [T, output]."""
        rows = self.pre_norm(squares).flatten(1)
        out: torch.Tensor = self.proj["2"](F.gelu(self.proj["0"](rows)))
        return out


class KimiImageEncoder(ImageEncoder):
    """Tower and projector, by their names in the checkpoint."""

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        sizes = KimiVisionSizes.of(config)
        self.vision_tower = KimiVisionTower(config, sizes, context)
        self.mm_projector = KimiProjector(sizes, context)
        self._sizes = sizes

    def forward(self, pixels: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Patches [N, 3, patch, patch] of a grid of (rows, columns) -> [N / merge^2, output]."""
        height, width = grid
        merge = self._sizes.merge
        rows = self.vision_tower.patch_embed(pixels, height, width)
        rows = self.vision_tower.encoder(rows, self._turns(height, width, pixels.device))
        squares = rows.view(height // merge, merge, width // merge, merge, -1).transpose(1, 2)
        out: torch.Tensor = self.mm_projector(squares.flatten(2, 3).flatten(0, 1))
        return out

    def largest_input(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        patch, merge = self._sizes.patch, self._sizes.merge
        rows, columns = _MOST_ALONG, _MOST_PATCHES // _MOST_ALONG + merge
        return (rows * columns, _CHANNELS, patch, patch), (rows, columns)

    def _turns(self, height: int, width: int, device: torch.device) -> torch.Tensor:
        """[height * width, 1, d / 2] complex; pairs turn by columns and by rows in turns."""
        half = self._sizes.hidden // self._sizes.heads // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
        speeds = self._sizes.theta**-exponents
        rows, columns = (
            torch.arange(n, dtype=torch.float32, device=device)[:, None] * speeds
            for n in (height, width)
        )
        grid = height, width, len(speeds)
        angles = torch.stack([columns[None].expand(grid), rows[:, None].expand(grid)], dim=-1)
        angles = angles.reshape(height * width, 1, half)
        return torch.polar(torch.ones_like(angles), angles)


def _rotate(rows: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """[N, heads, d], each pair of neighbours a complex number."""
    pairs = torch.view_as_complex(rows.float().view(*rows.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(rows.dtype)
