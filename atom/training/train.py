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
import torch.nn.functional as F

from atom.config import EngineConfig
from atom.model_loader.source import resolve_model
from atom.models.eagle3.config import Eagle3Config
from atom.platform import default_num_threads, select_platform
from atom.training.batches import BatchBuilder
from atom.training.checkpoint import (
    Progress,
    TrainingCheckpoint,
    checkpoint_files,
    load_checkpoint,
)
from atom.training.dataset import Dataset, Example
from atom.training.draft_config import make_draft_config
from atom.training.features import FeatureSource, StoredFeatures, TargetFeatures
from atom.training.initialise import (
    SKIPPED_ROWS,
    LinearGuess,
    initialise,
    whitening_matrix,
)
from atom.training.network import TrainingDraft
from atom.training.options import TrainOptions
from atom.training.prompts import DataError
from atom.training.target_parts import TargetParts, load_target_parts
from atom.training.trainer import LOG, Trainer
from atom.training.vocabulary import choose_vocabulary, count_tokens, soft_counts

logger = logging.getLogger(__name__)

# Rows for the initial fit and for the soft counts of the vocabulary.
_FIT_ROWS = 120_000
_COUNTED_ROWS = 20_000
DEFAULT_DRAFT_VOCAB_SIZE = 8192


@dataclass(frozen=True)
class TrainRequest:
    """Attributes:
    config: of the engine that runs the target.
    data: dataset folders.
    output: folder of the run; resumed if it has a checkpoint.
    attention: `mha` or `mla`.
    draft_vocab_size: size of the draft's vocabulary; None for the default.
    aux_layer_ids: boundary ids; None for the dataset's, else the target's default.
    initial_draft: folder or checkpoint of another run, whose draft is trained further.
    workers: batches computed concurrently; at most `accumulate`.
    """

    config: EngineConfig
    options: TrainOptions
    data: tuple[Path, ...]
    output: Path
    attention: str = "mha"
    draft_vocab_size: int | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    initial_draft: Path | None = None
    workers: int = 1


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
    features = _feature_source(request, dataset, parts)
    if not platform.is_gpu:
        threads = config.parallel.num_threads or default_num_threads()
        torch.set_num_threads(max(1, threads // request.workers))
    fitted, held_out = _split(dataset.texts, options)
    request.output.mkdir(parents=True, exist_ok=True)
    if checkpoint_files(request.output):
        start = load_checkpoint(request.output)
    elif request.initial_draft is not None:
        start = _further(request, request.initial_draft, text_config, features)
    else:
        start = _start(request, text_config, fitted, features, parts)
    draft_config = Eagle3Config.from_dict(start.draft_config)
    longest = max(len(text) for text in dataset.texts) + options.depth
    device = platform.device
    draft = TrainingDraft(
        draft_config, parts.embedding.to(device), start.tensors.get("whitening"), longest
    ).to(device)
    draft.load_state_dict(start.weights(), strict=False)
    head = parts.head[start.vocabulary].float().to(device)
    builder = BatchBuilder(features, head, options.depth, options.num_targets, device)
    trainer = Trainer(
        draft,
        start.draft_config,
        start.vocabulary,
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
        "attention": request.attention,
        "draft_vocab_size": request.draft_vocab_size,
        "initial_draft": None if request.initial_draft is None else str(request.initial_draft),
        "aux_layer_ids": list(features.aux_layer_ids),
        "data": [*shards, len(dataset.texts), tokens],
    }


def _feature_source(request: TrainRequest, dataset: Dataset, parts: TargetParts) -> FeatureSource:
    wanted = request.aux_layer_ids
    if dataset.aux_layer_ids is not None and wanted in (None, dataset.aux_layer_ids):
        return StoredFeatures(dataset)
    return TargetFeatures(request.config, wanted or parts.default_aux_layer_ids)


def _split(texts: Sequence[Example], options: TrainOptions) -> tuple[list[Example], list[Example]]:
    order = list(texts)
    random.Random(f"held out {options.seed}").shuffle(order)
    count = math.ceil(options.held_out * len(order))
    if count == len(order):
        raise DataError(f"{len(order)} text(s) are too few to hold any out; --held-out 0")
    return order[count:], order[:count]


def _further(
    request: TrainRequest, path: Path, text_config: Any, features: FeatureSource
) -> TrainingCheckpoint:
    """Step 0, with the weights, vocabulary and whitening of another run."""
    other = load_checkpoint(path)
    size = len(other.vocabulary) if request.draft_vocab_size is None else request.draft_vocab_size
    expected = make_draft_config(text_config, request.attention, size, features.aux_layer_ids)
    differing = sorted(
        name
        for name in expected.keys() | other.draft_config.keys()
        if expected.get(name) != other.draft_config.get(name)
    )
    if differing:
        raise DataError(
            f"{path} is a draft of another kind than the one asked for: they differ in "
            f"{', '.join(differing)}"
        )
    kept = {f"weight.{name}": weight for name, weight in other.weights().items()}
    if "whitening" in other.tensors:
        kept["whitening"] = other.tensors["whitening"]
    return TrainingCheckpoint(other.draft_config, {}, Progress(), other.vocabulary, kept)


def _start(
    request: TrainRequest,
    text_config: Any,
    texts: Sequence[Example],
    features: FeatureSource,
    parts: TargetParts,
) -> TrainingCheckpoint:
    """Step 0, with a new vocabulary, whitening and initial weights."""
    options = request.options
    order = list(texts)
    random.Random(f"fit {options.seed}").shuffle(order)
    sample, soft, guess = _look_at(order, features, parts)
    counts = count_tokens((t.token_ids[t.mask] for t in texts), len(parts.head), soft)
    size = (
        DEFAULT_DRAFT_VOCAB_SIZE if request.draft_vocab_size is None else request.draft_vocab_size
    )
    vocabulary = choose_vocabulary(counts, size)
    logger.info(
        "%d texts, %d trained tokens; %d draft tokens cover %.2f %% of them",
        len(texts),
        sum(int(t.mask.sum()) for t in texts),
        len(vocabulary),
        100 * float(counts[vocabulary].sum() / counts.sum()),
    )
    raw = make_draft_config(text_config, request.attention, len(vocabulary), features.aux_layer_ids)
    draft = TrainingDraft(Eagle3Config.from_dict(raw), parts.embedding, whitening_matrix(sample), 1)
    mlp = None
    if parts.gate_proj is not None and parts.up_proj is not None:
        mlp = {"gate_proj": parts.gate_proj, "up_proj": parts.up_proj}
    generator = torch.Generator().manual_seed(options.seed)
    head = parts.head[vocabulary].float()
    initialise(draft, guess, parts.final_norm, head, mlp, generator)
    tensors = {f"weight.{name}": weight.data for name, weight in draft.named_parameters()}
    assert draft.whitening is not None
    tensors["whitening"] = draft.whitening
    return TrainingCheckpoint(raw, {}, Progress(), vocabulary, tensors)


def _look_at(
    texts: Sequence[Example], features: FeatureSource, parts: TargetParts
) -> tuple[torch.Tensor, torch.Tensor, LinearGuess]:
    """Sampled aux states, the target's token probabilities, and the linear prediction."""
    hidden = parts.embedding.shape[1]
    guess: LinearGuess | None = None
    sample: list[torch.Tensor] = []
    soft = torch.zeros(len(parts.head), dtype=torch.float64)
    head = parts.head.float()
    rows = counted = 0
    for start in range(0, len(texts), 16):
        chosen = texts[start : start + 16]
        for text, states in zip(chosen, features.features(chosen), strict=True):
            skip = min(SKIPPED_ROWS, len(text) // 2)
            aux, final = states[:, :-hidden].float(), states[:, -hidden:]
            if guess is None:
                guess = LinearGuess(aux.shape[1], hidden)
            embeds = F.embedding(text.token_ids[skip + 1 : -1].long(), parts.embedding).float()
            guess.add(aux[skip:-1], embeds, final[skip + 1 :].float() / parts.final_norm)
            rows += len(embeds)
            if counted < _COUNTED_ROWS:
                written = final[text.mask[1:]]
                soft += soft_counts(written.float(), head)
                counted += len(written)
                sample.append(aux[skip:])
        if rows >= _FIT_ROWS:
            break
    assert guess is not None
    return torch.cat(sample), soft, guess


def _print_line(line: dict[str, Any]) -> None:
    loss = " ".join(f"{x:.3f}" for x in line["loss"])
    hits = " ".join(f"{x:.3f}" for x in line["hits"])
    text = (
        f"step {line['step']}/{line['of']}  rows {line['rows']}  loss {loss}  hits {hits}  "
        f"{line['rows_per_second']:.0f} rows/s"
    )
    if line.get("held_out"):
        shares = " ".join(f"{x:.3f}" for x in line["held_out"]["acceptance"])
        text += f"  held out {shares}"
    print(text, flush=True)
