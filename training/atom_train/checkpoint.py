"""Training checkpoints: one safetensors file with everything for an exact resume."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from atom_train.data.prompts import DataError

_KEPT = 2


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Attributes:
        step: optimiser steps done.
        epoch, place: the next batch.
        rows: drafting rows seen.
    """

    step: int = 0
    epoch: int = 0
    place: int = 0
    rows: int = 0


@dataclass(frozen=True)
class TrainingCheckpoint:
    """Attributes:
    draft_config: raw `config.json` of the draft.
    settings: of the run; a resumed run must have the same.
    vocabulary: [draft vocab] int64 target token ids.
    tensors: weights (`weight.*`), optimiser moments (`first.*`, `second.*`), `whitening`.
    """

    draft_config: dict[str, Any]
    settings: dict[str, Any]
    progress: Progress
    vocabulary: torch.Tensor
    tensors: dict[str, torch.Tensor]

    def weights(self) -> dict[str, torch.Tensor]:
        prefix = "weight."
        return {n[len(prefix) :]: t for n, t in self.tensors.items() if n.startswith(prefix)}


def save_checkpoint(folder: Path, checkpoint: TrainingCheckpoint) -> Path:
    """Write a checkpoint atomically, and delete older ones."""
    path = folder / f"checkpoint-{checkpoint.progress.step:08d}.safetensors"
    metadata = {
        "draft_config": json.dumps(checkpoint.draft_config),
        "settings": json.dumps(checkpoint.settings),
        "progress": json.dumps(vars(checkpoint.progress)),
    }
    temporary = path.with_suffix(".tmp")
    tensors = {**checkpoint.tensors, "vocabulary": checkpoint.vocabulary}
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, temporary, metadata)
    temporary.replace(path)
    for old in checkpoint_files(folder)[:-_KEPT]:
        old.unlink()
    return path


def checkpoint_files(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("checkpoint-*.safetensors"))


def load_checkpoint(path: Path) -> TrainingCheckpoint:
    """Load a checkpoint file, or the newest one of a run's folder.

    Raises:
        DataError: when there is none or it is damaged.
    """
    if path.is_dir():
        files = checkpoint_files(path)
        if not files:
            raise DataError(f"{path} holds no checkpoint-*.safetensors: nothing was trained there")
        path = files[-1]
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return TrainingCheckpoint(
            json.loads(metadata["draft_config"]),
            json.loads(metadata["settings"]),
            Progress(**json.loads(metadata["progress"])),
            tensors.pop("vocabulary"),
            tensors,
        )
    except Exception as error:  # safetensors has its own exception class
        raise DataError(f"{path} is no training checkpoint: {error}") from error


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, draft: nn.Module
) -> dict[str, torch.Tensor]:
    """The optimiser moments of all trained weights."""
    tensors = {}
    for name, weight in draft.named_parameters():
        state = optimizer.state.get(weight)
        if state:
            tensors[f"first.{name}"] = state["exp_avg"]
            tensors[f"second.{name}"] = state["exp_avg_sq"]
    return tensors


def restore_optimizer(
    optimizer: torch.optim.Optimizer, draft: nn.Module, checkpoint: TrainingCheckpoint
) -> None:
    step = torch.tensor(float(checkpoint.progress.step))
    for name, weight in draft.named_parameters():
        if f"first.{name}" in checkpoint.tensors:
            optimizer.state[weight] = {
                "step": step.to(weight.device, copy=True),
                "exp_avg": checkpoint.tensors[f"first.{name}"].to(weight.device),
                "exp_avg_sq": checkpoint.tensors[f"second.{name}"].to(weight.device),
            }
