"""Lets recorded drafts follow another guide in each replay."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import between_kernels
from atom.spec_decode.base import Guide


class RecordedGuide:
    """Asks the guide of the step that runs.

    Attributes:
        own: that guide.
    """

    own: Guide

    def restrict(self, logits: torch.Tensor, target_ids: torch.Tensor | None) -> None:
        between_kernels(lambda: self.own.restrict(logits, target_ids), logits)

    def take(self, token_ids: torch.Tensor) -> None:
        between_kernels(lambda: self.own.take(token_ids), token_ids)
