"""The options of a training run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainOptions:
    """Attributes:
    epochs: passes over the data, may be fractional; the learning rate decays to 0 over them.
    rows_per_batch: drafting rows per batch.
    accumulate: batches per optimiser step.
    depth: number of unrolled draft steps.
    step_decay: the weight of step i is `step_decay ** i`.
    l1_weight: share of the total variation in the loss, beside soft cross-entropy.
    lr, lr_fc, lr_head: peak rates of AdamW; a head rate of 0 freezes the head.
    warmup: share of the steps with increasing rates.
    num_targets: entries kept of each target distribution.
    num_negatives: random candidates for the normaliser besides the targets' own; None for all
    tokens.
    held_out: share of the texts that are used for evaluation only.
    dtype: `float32` or `bfloat16` for the computation; weights and optimiser are float32.
    log_every, save_every: in optimiser steps; save_every is a multiple of log_every.
    """

    epochs: float = 3.0
    rows_per_batch: int = 512
    accumulate: int = 1
    depth: int = 3
    step_decay: float = 0.8
    l1_weight: float = 0.9
    lr: float = 8e-4
    lr_fc: float = 3e-4
    lr_head: float = 4e-4
    warmup: float = 0.03
    clip: float = 1.0
    num_targets: int = 64
    num_negatives: int | None = None
    held_out: float = 0.02
    dtype: str = "float32"
    log_every: int = 20
    save_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("rows_per_batch", "accumulate", "depth", "num_targets", "log_every", "save_every")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.epochs <= 0:
            raise ValueError(f"epochs must be positive, got {self.epochs}")
        if not 0 <= self.l1_weight <= 1:
            raise ValueError(f"l1_weight must be in [0, 1], got {self.l1_weight}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out must be in [0, 1), got {self.held_out}")
        if self.save_every % self.log_every:
            raise ValueError(
                f"save_every ({self.save_every}) must be a multiple of log_every "
                f"({self.log_every}), so that a resumed log has no gap"
            )
        if self.num_negatives is not None and self.num_negatives < 1:
            raise ValueError(f"num_negatives must be at least 1, got {self.num_negatives}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype!r}")
