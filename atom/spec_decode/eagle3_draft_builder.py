"""The KV cache of an Eagle3 draft."""

from __future__ import annotations

import torch

from atom.kv_cache.builders import attention_layers
from atom.kv_cache.paged import PagedCache
from atom.models.eagle3.base import Eagle3Draft


class Eagle3DraftBuilder(PagedCache):
    """The draft's KV pool, separate from the target's.

    Pools are `eagle3_kv_cache` and, for FP8, `eagle3_kv_scale`. Block size and block ids are the
    target's, so one block table serves both, whatever the target's attention (MHA or MLA).
    """

    def __init__(
        self, draft: Eagle3Draft, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(attention_layers(draft), block_size, dtype, device, prefix="eagle3_")
