"""When the sampling kernels can run; imports Triton only when one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atom.model_ops.metadata import SamplingMetadata
from atom.model_ops.registry import OpQuery

if TYPE_CHECKING:
    import torch

# The masses of all tokens together fit into an integer.
_LARGEST_VOCABULARY = 2**18


def refuses_choice(query: OpQuery) -> str | None:
    """Why tokens of this vocabulary cannot be chosen; None when they can."""
    size = query.shape["vocab_size"]
    too_large = size > _LARGEST_VOCABULARY
    return f"vocab_size={size} is larger than {_LARGEST_VOCABULARY}" if too_large else None


def load_choose_tokens() -> Callable[[torch.Tensor, SamplingMetadata], torch.Tensor]:
    from atom.model_ops.kernels.triton.choose_tokens import choose_tokens

    return choose_tokens


def load_mask_tokens() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]:
    from atom.model_ops.kernels.triton.mask_tokens import mask_tokens

    return mask_tokens
