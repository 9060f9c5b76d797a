"""Checkpoints that say that their output head is the embedding, and hold another head."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from atom.model_loader.checkpoint import has_weights, list_tensors
from atom.model_loader.safetensors_reader import CheckpointTensor, map_tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

_EMBEDDING = re.compile(r"(?:.*\.)?model\.embed_tokens\.weight")
_HEAD = re.compile(r"(?:.*\.)?lm_head\.weight")
_ROWS_AT_ONCE = 4096


def untie_different_head(config: PretrainedConfig, folder: Path) -> None:
    """Make `config` say that the head is a weight of its own, where the files hold another one.

    transformers computes the same: it ties only what is absent or equal.

    Args:
        config: of the language model.

    Raises:
        WeightError: when a weight file is damaged.
    """
    if not config.tie_word_embeddings or not has_weights(folder):
        return
    tensors = list_tensors(folder)
    embedding, head = _find(_EMBEDDING, tensors), _find(_HEAD, tensors)
    if embedding is None or head is None or _are_equal(embedding, head):
        return
    logger.warning(
        "%s says tie_word_embeddings, and %s holds other values than %s: the head of the file is "
        "used",
        folder / "config.json",
        head.name,
        embedding.name,
    )
    config.tie_word_embeddings = False


def _find(name: re.Pattern[str], tensors: Sequence[CheckpointTensor]) -> CheckpointTensor | None:
    return next((tensor for tensor in tensors if name.fullmatch(tensor.name)), None)


def _are_equal(a: CheckpointTensor, b: CheckpointTensor) -> bool:
    """By value, some rows at a time."""
    if a.shape != b.shape:
        return False
    rows_of_a, rows_of_b = map_tensor(a), map_tensor(b)
    return all(
        torch.equal(
            rows_of_a[start : start + _ROWS_AT_ONCE].double(),
            rows_of_b[start : start + _ROWS_AT_ONCE].double(),
        )
        for start in range(0, a.shape[0], _ROWS_AT_ONCE)
    )
