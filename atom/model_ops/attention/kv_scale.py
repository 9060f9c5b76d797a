"""Per-tensor scales of an FP8 KV cache, loaded from the checkpoint.

value = stored number * scale. Checkpoints calibrate scales for e4m3fn (maximum 448). In e4m3fnuz
(maximum 240) the same bits mean half as much, so there the scale is doubled.
"""

from __future__ import annotations

import math
import re

import torch
from torch import nn

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)

_PARTS = ("k", "v")

# Groups: the attention's name, and "k", "v" or "kv" (one scale for both).
_FORMATS = (
    # compressed-tensors and vLLM; ModelOpt puts them beside the projections.
    re.compile(r"(.+\.self_attn)\.(?:attn\.|[kv]_proj\.|qkv_proj\.)?([kv])_scale"),
    # Quark: the scale of a projection's output.
    re.compile(r"(.+\.self_attn)\.([kv])_proj\.output_scale"),
    # AutoFP8.
    re.compile(r"(.+\.self_attn)\.(?:attn\.)?(kv)_scale"),
)

# Scales of queries and probabilities are unused: attention computes in the model's dtype.
_UNUSED = re.compile(
    r".+\.self_attn\.(?:(?:attn\.|q_proj\.|qkv_proj\.)?q_scale|q_proj\.output_scale"
    r"|(?:attn\.)?prob(?:_output)?_scale)"
)


class KVScale(nn.Module):
    """The KV cache scales of one layer.

    Attributes:
        given: [2] float32, the checkpoint's scales of keys and values; 0 where it has none.
    """

    given: torch.Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        # A buffer, since a checkpoint need not fill it.
        self.register_buffer("given", torch.zeros(len(_PARTS), device=device))

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Load the scale of "k" or "v", or of both without a shard.

        Raises:
            ValueError: when it is not one positive finite number.
        """
        if tensor.numel() != 1:
            raise ValueError(
                f"the checkpoint holds KV cache scales of shape {list(tensor.shape)}; only one "
                f"scale for the whole tensor is supported"
            )
        if tensor.is_meta:  # only the shape is checked
            return
        value = float(tensor)
        if not 0 < value < math.inf:
            raise ValueError(f"a scale of the KV cache must be positive and finite, got {value:g}")
        if shard is None:
            self.given.fill_(value)
        else:
            self.given[_PARTS.index(shard)] = value

    @property
    def is_given(self) -> bool:
        """Whether the checkpoint has any of the scales."""
        return bool(self.given.any())

    def of_keys_and_values(self, storage: torch.dtype) -> torch.Tensor:
        """[2] float32 for a cache of dtype `storage`; 1 where the checkpoint has none."""
        return _as_stored(self.given, storage)

    def of_latents(self, storage: torch.dtype) -> torch.Tensor:
        """[1] float32: the larger scale, since a latent serves as key and value."""
        return _as_stored(self.given.amax(0, keepdim=True), storage)


def _as_stored(given: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    factor = 2 if storage is torch.float8_e4m3fnuz else 1
    return torch.where(given > 0, given * factor, torch.ones_like(given))


def place_kv_scale(name: str) -> tuple[str, str | None] | None:
    """Buffer and shard for a checkpoint tensor; None if it is not a KV scale."""
    if not name.endswith("_scale"):
        return None
    for pattern in _FORMATS:
        if match := pattern.fullmatch(name):
            attention, part = match.groups()
            return f"{attention}.attn.kv_scale.given", part if part in _PARTS else None
    return None


def is_unused_scale(name: str) -> bool:
    """Whether a checkpoint tensor is a scale of something that is not cached."""
    return name.endswith("_scale") and _UNUSED.fullmatch(name) is not None
