"""The KV cache of multi-head latent attention."""

from __future__ import annotations

import torch
from torch import nn

from atom.kv_cache.base import num_spare_blocks, zero_pool
from atom.model_ops.attention_mla import MLAAttention
from atom.model_ops.kv_scale import FP8_TYPES
from atom.model_ops.metadata import LatentCacheTensor


class MLACacheBuilder:
    """The target's latents: [layers, blocks, block_size, kv_lora_rank + qk_rope_head_dim].

    Of 8 bits they have scales beside them, [layers] float32.
    """

    key = "kv_cache"
    scale_key = "kv_scale"

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
        if self._dtype not in FP8_TYPES:
            self._layers = {
                layer_id: LatentCacheTensor(pool[i]) for i, layer_id in enumerate(self._modules)
            }
            return {self.key: pool}
        scales = torch.cat([m.kv_scale.of_latents(self._dtype) for m in self._modules.values()])
        self._layers = {
            layer_id: LatentCacheTensor(pool[i], scales[i : i + 1])
            for i, layer_id in enumerate(self._modules)
        }
        return {self.key: pool, self.scale_key: scales}

    def build_kv_cache_tensor(self, layer_id: int, module: nn.Module) -> LatentCacheTensor | None:
        if self._modules.get(layer_id) is not module:
            return None
        return self._layers[layer_id]
