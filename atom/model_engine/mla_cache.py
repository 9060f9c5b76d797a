"""The KV cache of multi-head latent attention."""

from __future__ import annotations

import torch
from torch import nn

from atom.model_engine.kv_cache import num_spare_blocks, zero_pool
from atom.model_ops.attention_mla import MLAAttention
from atom.model_ops.metadata import LatentCacheTensor


class MLACacheBuilder:
    """The target's latents: [layers, blocks, block_size, kv_lora_rank + qk_rope_head_dim]."""

    key = "kv_cache"

    def __init__(
        self,
        modules: dict[int, MLAAttention],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        widths = {m.latent_dim for m in modules.values()}
        if len(widths) != 1:
            raise ValueError(f"latent layers of one pool must be equally wide, got {widths}")
        self._latent_dim = widths.pop()
        self._modules = modules
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._layers: dict[int, LatentCacheTensor] = {}

    def compute_block_bytes(self) -> int:
        elements = len(self._modules) * self._block_size * self._latent_dim
        return elements * self._dtype.itemsize

    def allocate_kv_cache_tensors(self, num_blocks: int) -> dict[str, torch.Tensor]:
        blocks = num_blocks + num_spare_blocks(self._device)
        shape = (len(self._modules), blocks, self._block_size, self._latent_dim)
        pool = zero_pool(shape, self._dtype, self._device)
        self._layers = {
            layer_id: LatentCacheTensor(pool[i]) for i, layer_id in enumerate(self._modules)
        }
        return {self.key: pool}

    def build_kv_cache_tensor(self, layer_id: int, module: nn.Module) -> LatentCacheTensor | None:
        if self._modules.get(layer_id) is not module:
            return None
        return self._layers[layer_id]
