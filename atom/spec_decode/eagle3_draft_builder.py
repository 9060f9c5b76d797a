"""The KV cache of an Eagle3 draft, beside whatever the target caches."""

from __future__ import annotations

import torch

from atom.kv_cache.builders import attention_layers
from atom.kv_cache.paged import PagedCache
from atom.models.eagle3.base import Eagle3Draft


class Eagle3DraftBuilder(PagedCache):
    """Owns the draft's KV, in the pool format that a target with the draft's attention has.

    The pool is `eagle3_kv_cache`; of 8 bits it has `eagle3_kv_scale` beside it. Block size and
    block ids are the target's, so that one block table serves both; whether the target's own
    attention is multi-head or latent makes no difference. KV heads are this rank's: fewer heads
    than ranks are replicated, never none.
    """

    def __init__(
        self, draft: Eagle3Draft, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(attention_layers(draft), block_size, dtype, device, prefix="eagle3_")
