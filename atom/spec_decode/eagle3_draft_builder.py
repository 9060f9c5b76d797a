"""The KV cache of an Eagle3 draft, beside whatever the target caches."""

from __future__ import annotations

import torch
from torch import nn

from atom.kv_cache.builders import target_cache_builders
from atom.model_ops.metadata import CacheTensor
from atom.models.eagle3.base import Eagle3Draft


class Eagle3DraftBuilder:
    """Owns the draft's KV, in the pool format that a target with the draft's attention has.

    Block size and block ids are the target's, so that one block table serves both; whether the
    target's own attention is multi-head or latent makes no difference. KV heads are this
    rank's: fewer heads than ranks are replicated, never none.

    Attributes:
        key, scale_key: names of the pool and, where it is of 8 bits, of its scales.
    """

    key = "eagle3_kv_cache"
    scale_key = "eagle3_kv_scale"

    def __init__(
        self, draft: Eagle3Draft, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # One layer, so one kind of attention.
        (self._layer_cache,) = target_cache_builders(draft, block_size, dtype, device)

    def compute_block_bytes(self) -> int:
        return self._layer_cache.compute_block_bytes()

    def allocate_kv_cache_tensors(self, num_blocks: int) -> dict[str, torch.Tensor]:
        names = {self._layer_cache.key: self.key, self._layer_cache.scale_key: self.scale_key}
        tensors = self._layer_cache.allocate_kv_cache_tensors(num_blocks)
        return {names[name]: tensor for name, tensor in tensors.items()}

    def build_kv_cache_tensor(self, layer_id: int, module: nn.Module) -> CacheTensor | None:
        return self._layer_cache.build_kv_cache_tensor(layer_id, module)
