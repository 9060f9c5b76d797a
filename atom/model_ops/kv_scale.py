"""Per-tensor scales of an 8-bit KV cache, as checkpoints carry them.

What is stored times the scale is the real number. Checkpoints calibrate scales for e4m3fn
(largest number 448). The same bits mean half as much in e4m3fnuz (largest 240), so there the
scale is doubled.
"""

from __future__ import annotations

import math
import re

import torch
from torch import nn

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)

_PARTS = ("k", "v")

# The attention's name, then which scale: "k", "v", or "kv" for one that serves both.
_FORMATS = (
    # compressed-tensors and vLLM; ModelOpt puts them beside the projections.
    re.compile(r"(.+\.self_attn)\.(?:attn\.|[kv]_proj\.|qkv_proj\.)?([kv])_scale"),
    # Quark: the scale of a projection's output.
    re.compile(r"(.+\.self_attn)\.([kv])_proj\.output_scale"),
    # AutoFP8.
    re.compile(r"(.+\.self_attn)\.(?:attn\.)?(kv)_scale"),
)

# Of queries and probabilities, which are never stored: attention multiplies in the model's type.
_UNUSED = re.compile(
    r".+\.self_attn\.(?:(?:attn\.|q_proj\.|qkv_proj\.)?q_scale|q_proj\.output_scale"
    r"|(?:attn\.)?prob(?:_output)?_scale)"
)


class KVScale(nn.Module):
    """What a checkpoint says about the range of one layer's keys and values.

    Attributes:
        given: [2] float32, the scales of keys and of values; 0 where the checkpoint has none.
    """

    given: torch.Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        # A buffer: a checkpoint may leave it alone.
        self.register_buffer("given", torch.zeros(len(_PARTS), device=device))

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Take the scale of "k", of "v" or, without a shard, of both.

        Raises:
            ValueError: when it is not one positive finite number.
        """
        if tensor.numel() != 1:
            raise ValueError(
                f"the checkpoint holds KV cache scales of shape {list(tensor.shape)}; only one "
                f"scale for the whole tensor is supported"
            )
        value = float(tensor)
        if not 0 < value < math.inf:
            raise ValueError(f"a scale of the KV cache must be positive and finite, got {value:g}")
        if shard is None:
            self.given.fill_(value)
        else:
            self.given[_PARTS.index(shard)] = value

    @property
    def is_given(self) -> bool:
        """Whether the checkpoint has any."""
        return bool(self.given.any())

    def of_keys_and_values(self, storage: torch.dtype) -> torch.Tensor:
        """[2] float32 for a cache of type `storage`; 1 where the checkpoint has none."""
        return _as_stored(self.given, storage)

    def of_latents(self, storage: torch.dtype) -> torch.Tensor:
        """[1] float32: a latent is both key and value, so the wider range counts."""
        return _as_stored(self.given.amax(0, keepdim=True), storage)


def _as_stored(given: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    factor = 2 if storage is torch.float8_e4m3fnuz else 1
    return torch.where(given > 0, given * factor, torch.ones_like(given))


def place_kv_scale(name: str) -> tuple[str, str | None] | None:
    """The buffer and the shard for a checkpoint's tensor; None when it is no such scale."""
    for pattern in _FORMATS:
        if match := pattern.fullmatch(name):
            attention, part = match.groups()
            return f"{attention}.attn.kv_scale.given", part if part in _PARTS else None
    return None


def is_unused_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is a scale of what is never stored in 8 bits."""
    return _UNUSED.fullmatch(name) is not None
