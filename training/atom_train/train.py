"""`train`: train a draft on datasets."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from atom.config import EngineConfig
from atom.model_loader.source import resolve_model
from atom.platform import select_platform
from atom.processors import default_num_threads
from atom_train.checkpoint import (
    TrainingCheckpoint,
    checkpoint_files,
    load_checkpoint,
)
from atom_train.data.batches import BatchBuilder
from atom_train.data.dataset import Dataset, Example
from atom_train.data.features import FeatureSource, StoredFeatures, TargetFeatures
from atom_train.data.prompts import DataError
from atom_train.data.target_probs import TargetProbabilities
from atom_train.kinds import BlockKind, DraftKind, Eagle3Kind
from atom_train.options import TrainOptions
from atom_train.start import anew, further
from atom_train.target_parts import TargetParts, load_target_parts
from atom_train.trainer import LOG, Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainRequest:
    """Attributes:
    config: of the engine that runs the target.
    data: dataset folders.
    output: folder of the run; resumed if it has a checkpoint.
    draft: `eagle3`, or `block` for a DSpark draft.
    attention: of an Eagle3 draft, `mha` or `mla`.
    layers, markov_rank: of a block drafter; the block has `options.depth` rows.
    draft_vocab_size: size of the draft's vocabulary; None for the default.
    aux_layer_ids: boundary ids; None for the dataset's, else the target's default.
    initial_draft: a draft to train further: exported, or of another run; None for a new one.
    workers: batches computed concurrently; at most `accumulate`.
    """

    config: EngineConfig
    options: TrainOptions
    data: tuple[Path, ...]
    output: Path
    draft: str = "eagle3"
    attention: str = "mha"
    layers: int = 1
    markov_rank: int = 64
    draft_vocab_size: int | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    initial_draft: Path | None = None
    workers: int = 1

    def kind(self, target: PretrainedConfig) -> DraftKind:
        if self.draft == "block":
            return BlockKind(target, self.layers, self.markov_rank, self.options.depth)
        return Eagle3Kind(target, self.attention)


def train(request: TrainRequest) -> TrainingCheckpoint:
    """Train, or resume training.

    Raises:
        DataError: for unusable data.
        ConfigError: for a target that cannot be loaded.
        ValueError: for a checkpoint with other settings.
    """
    config, options = request.config, request.options
    platform = select_platform(config.device)
    source = resolve_model(config.model)
    text_config = source.hf_config.get_text_config()
    dataset = Dataset.read(request.data, source.name, text_config.vocab_size)
    parts = load_target_parts(config, source)
    features = feature_source(config, dataset, request.aux_layer_ids, parts)
    if not platform.is_gpu:
        threads = config.parallel.num_threads or default_num_threads()
        torch.set_num_threads(max(1, threads // request.workers))
    fitted, held_out = _split(dataset.texts, options)
    request.output.mkdir(parents=True, exist_ok=True)
    kind = request.kind(text_config)
    if checkpoint_files(request.output):
        start = load_checkpoint(request.output)
    elif request.initial_draft is not None:
        start = further(
            request.initial_draft,
            kind,
            request.draft_vocab_size,
            fitted,
            features,
            options.seed,
        )
    else:
        start = anew(kind, request.draft_vocab_size, fitted, features, parts, options.seed)
    longest = max(len(text) for text in dataset.texts) + options.depth
    device = platform.device
    draft = kind.network(
        start.draft_config, parts.embedding.to(device), start.tensors.get("whitening"), longest
    ).to(device)
    draft.load_state_dict(start.weights(), strict=False)
    target = TargetProbabilities(parts.head.to(device), start.vocabulary.to(device))
    builder = BatchBuilder(features, target, options.depth, options.num_targets, device)
    trainer = Trainer(
        draft,
        start.draft_config,
        target,
        builder,
        options,
        request.output,
        device,
        request.workers,
        _print_line,
        data_settings(request, dataset, features),
    )
    if start.progress.step:
        trainer.restore(start)
        logger.info("going on after step %d", start.progress.step)
    else:
        (request.output / LOG).write_text("", encoding="utf-8")
    return trainer.run(fitted, held_out)


def data_settings(
    request: TrainRequest, dataset: Dataset, features: FeatureSource
) -> dict[str, Any]:
    """Settings besides the options that a resumed run must share."""
    shards = sorted({f"{place.shard.parent.name}/{place.shard.name}" for place in dataset.places})
    tokens = sum(len(text) for text in dataset.texts)
    return {
        "draft": request.draft,
        "attention": request.attention,
        "layers": request.layers,
        "markov_rank": request.markov_rank,
        "draft_vocab_size": request.draft_vocab_size,
        "initial_draft": None if request.initial_draft is None else str(request.initial_draft),
        "aux_layer_ids": list(features.aux_layer_ids),
        "data": [*shards, len(dataset.texts), tokens],
    }


def feature_source(
    config: EngineConfig, dataset: Dataset, wanted: tuple[int, ...] | None, parts: TargetParts
) -> FeatureSource:
    """The stored features, or a target that computes them where others are wanted.

    Args:
        wanted: boundary ids of their layers; None for the dataset's, else the target's default.
    """
    if dataset.aux_layer_ids is not None and wanted in (None, dataset.aux_layer_ids):
        return StoredFeatures(dataset)
    return TargetFeatures(config, wanted or parts.default_aux_layer_ids)


def _split(texts: Sequence[Example], options: TrainOptions) -> tuple[list[Example], list[Example]]:
    order = list(texts)
    random.Random(f"held out {options.seed}").shuffle(order)
    count = math.ceil(options.held_out * len(order))
    if count == len(order):
        raise DataError(f"{len(order)} text(s) are too few to hold any out; --held-out 0")
    return order[count:], order[:count]


def _print_line(line: dict[str, Any]) -> None:
    loss = " ".join(f"{x:.3f}" for x in line["loss"])
    hits = " ".join(f"{x:.3f}" for x in line["hits"])
    text = (
        f"step {line['step']}/{line['of']}  rows {line['rows']}  loss {loss}  hits {hits}  "
        f"{line['rows_per_second']:.0f} rows/s"
    )
    for temperature, measured in line.get("held_out", {}).items():
        shares = " ".join(f"{x:.3f}" for x in measured["accepted"])
        text += f"  held out at {temperature}: {shares}"
    print(text, flush=True)
