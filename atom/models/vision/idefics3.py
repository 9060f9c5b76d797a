"""The tower and connector of Idefics3 and SmolVLM: square tiles, each by itself.

Source of names and computation: transformers' `idefics3`.
"""

from __future__ import annotations

import torch
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

# Tiles of the largest image, and itself made small, with the published processors.
_MOST_TILES = 17


class LearnedPositions(nn.Module):
    """[places, hidden]."""

    def __init__(self, places: int, size: int, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(places, size)


class SiglipEmbeddings(nn.Module):
    """Patches of tiles, with a learned position for each place in a tile."""

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        self._patch: int = config.patch_size
        self._side: int = config.image_size // config.patch_size
        size = config.hidden_size
        self.patch_embedding = PatchProjection(size, config.num_channels, self._patch, context)
        self.position_embedding = LearnedPositions(self._side**2, size, context)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """[n, channels, side, side] -> [n, patches, hidden]."""
        count, channels = tiles.shape[:2]
        cut = tiles.view(count, channels, self._side, self._patch, self._side, self._patch)
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        positions = self.position_embedding.weight[self._places(tiles.device)]
        out: torch.Tensor = self.patch_embedding(patches) + positions
        return out

    def _places(self, device: torch.device) -> torch.Tensor:
        """[patches] int64, as they were rounded in training: not always the patch's own."""
        step = 1 / self._side
        bounds = torch.arange(step, 1.0, step, device=device)
        shares = torch.arange(self._side, dtype=torch.float32, device=device)
        shares = shares * (1.0 / torch.tensor(self._side, device=device))
        along = torch.bucketize(shares.clamp(max=1.0 - 1e-6), bounds, right=True)
        return (along[:, None] * self._side + along).flatten()


class SiglipAttention(nn.Module):
    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        size = config.hidden_size
        self.q_proj = VisionLinear(size, size, context)
        self.k_proj = VisionLinear(size, size, context)
        self.v_proj = VisionLinear(size, size, context)
        self.out_proj = VisionLinear(size, size, context)
        self._heads: int = config.num_attention_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, patches, hidden] -> the same shape."""
        by_head = (*x.shape[:-1], self._heads, -1)
        q, k, v = (m(x).view(by_head) for m in (self.q_proj, self.k_proj, self.v_proj))
        out: torch.Tensor = self.out_proj(attend(q, k, v))
        return out


class SiglipMLP(nn.Module):
    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.fc1 = VisionLinear(*sizes, context)
        self.fc2 = VisionLinear(*sizes[::-1], context)
        self._gelu = gelu_of(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return feed(x, self.fc1, self.fc2, self._gelu)


class SiglipLayer(nn.Module):
    """Attention within each tile and an MLP, with pre-norms."""

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm1 = VisionNorm(size, eps, context)
        self.self_attn = SiglipAttention(config, context)
        self.layer_norm2 = VisionNorm(size, eps, context)
        self.mlp = SiglipMLP(config, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        out: torch.Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class SiglipTower(nn.Module):
    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        self.embeddings = SiglipEmbeddings(config, context)
        layers = (SiglipLayer(config, context) for i in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.post_layernorm = VisionNorm(config.hidden_size, config.layer_norm_eps, context)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """[n, channels, side, side] -> [n, patches, hidden]."""
        x = self.embeddings(tiles)
        for layer in self.encoder["layers"].children():
            x = layer(x)
        out: torch.Tensor = self.post_layernorm(x)
        return out


class Idefics3Projection(nn.Module):
    def __init__(self, inputs: int, outputs: int, context: LayerContext) -> None:
        super().__init__()
        self.proj = VisionLinear(inputs, outputs, context, bias=False)


class Idefics3Connector(nn.Module):
    """A square of patches becomes a row of the text network."""

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        self._scale: int = config.scale_factor
        inputs = config.vision_config.hidden_size * self._scale**2
        outputs = config.get_text_config().hidden_size
        self.modality_projection = Idefics3Projection(inputs, outputs, context)

    def forward(self, x: torch.Tensor, side: int) -> torch.Tensor:
        """[n, side * side, hidden] -> [n * side * side / scale^2, output]."""
        scale, along = self._scale, side // self._scale
        squares = x.reshape(-1, scale, along, scale * x.shape[-1]).transpose(1, 2)
        rows = squares.flatten(2).flatten(0, 1)
        out: torch.Tensor = self.modality_projection.proj(rows)
        return out


class Idefics3ImageEncoder(ImageEncoder):
    """Tower and connector, by their names in the checkpoint.

    Raises:
        ConfigError: when tiles do not divide into patches, or their patches into squares.
    """

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        vision = config.vision_config
        size, patch, scale = vision.image_size, vision.patch_size, config.scale_factor
        if not all(isinstance(n, int) and n > 0 for n in (size, patch, scale)):
            raise ConfigError(f"image_size={size!r}, patch_size={patch!r}: expected integers")
        if size % patch or size // patch % scale:
            raise ConfigError(
                f"tiles of image_size={size} do not divide into squares of scale_factor={scale} "
                f"patches of patch_size={patch}"
            )
        self.vision_model = SiglipTower(vision, context)
        self.connector = Idefics3Connector(config, context)
        self._side = size // patch
        self._tile = (int(vision.num_channels), size, size)

    def forward(self, pixels: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Tiles [n, 3, size, size], of whatever grid -> [n * tokens, output]."""
        out: torch.Tensor = self.connector(self.vision_model(pixels), self._side)
        return out

    def largest_input(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (_MOST_TILES, *self._tile), (4, 4)
