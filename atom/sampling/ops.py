"""The ops that choose and verify tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.torch import gather, sampling, speculation
from atom.model_ops.registry import OpTable
from atom.sampling.rows import OptionsOp


@dataclass(frozen=True)
class SamplingOps:
    """The ops of these names, as a platform has them; defaults are in plain torch."""

    choose_tokens: Callable[[torch.Tensor, SamplingMetadata], torch.Tensor] = sampling.choose_tokens
    mask_tokens: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None] = (
        sampling.mask_tokens
    )
    sampling_options: OptionsOp = gather.sampling_options
    verify_drafts: Callable[
        [torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        tuple[torch.Tensor, torch.Tensor],
    ] = speculation.verify_drafts
    place_samples: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
    ] = speculation.place_samples

    @classmethod
    def resolve(cls, ops: OpTable, vocab_size: int) -> SamplingOps:
        """The implementations for logits [R, vocab_size] float32."""
        return cls(
            ops.resolve("choose_tokens", torch.float32, vocab_size=vocab_size),
            ops.resolve("mask_tokens", torch.float32, vocab_size=vocab_size),
            ops.resolve("sampling_options", torch.float32),
            ops.resolve("verify_drafts", torch.float32),
            ops.resolve("place_samples", torch.float32),
        )


TORCH_OPS = SamplingOps()
