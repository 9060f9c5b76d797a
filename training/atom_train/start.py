"""Where a run starts: at the least-squares guess, or at another draft."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from atom_train.checkpoint import Progress, TrainingCheckpoint, load_checkpoint
from atom_train.data.dataset import Example
from atom_train.data.features import FeatureSource
from atom_train.data.prompts import DataError
from atom_train.data.vocabulary import choose_vocabulary, count_tokens, soft_counts
from atom_train.kinds import DraftKind
from atom_train.networks.initialise import (
    SKIPPED_ROWS,
    LinearGuess,
    unfold_whitening,
    whitening_matrix,
)
from atom_train.target_parts import TargetParts

logger = logging.getLogger(__name__)

# Rows for the initial fit, and for the whitening and the soft counts of the vocabulary.
_FIT_ROWS = 120_000
_COUNTED_ROWS = 20_000
DEFAULT_DRAFT_VOCAB_SIZE = 8192


def further(
    path: Path,
    kind: DraftKind,
    vocab_size: int | None,
    texts: Sequence[Example],
    features: FeatureSource,
    seed: int,
) -> TrainingCheckpoint:
    """Step 0, with the weights and vocabulary of another draft.

    Raises:
        DataError: for a draft of another kind, or what is none.
    """
    exported = (path / "config.json").exists()
    other = read_exported(path) if exported else load_checkpoint(path)
    size = len(other.vocabulary) if vocab_size is None else vocab_size
    differing = differences(other, kind, size, features.aux_layer_ids)
    if differing:
        raise DataError(
            f"{path} is a draft of another kind than the one asked for: they differ in "
            f"{', '.join(differing)}"
        )
    kept = {f"weight.{name}": weight for name, weight in other.weights().items()}
    if exported:
        whitening = whitening_matrix(_sample_aux(_shuffled(texts, seed), features))
        kept["whitening"] = whitening
        kept["weight.fc.weight"] = unfold_whitening(kept["weight.fc.weight"], whitening)
    elif "whitening" in other.tensors:
        kept["whitening"] = other.tensors["whitening"]
    return TrainingCheckpoint(other.draft_config, {}, Progress(), other.vocabulary, kept)


def differences(
    draft: TrainingCheckpoint, kind: DraftKind, vocab_size: int, aux_layer_ids: tuple[int, ...]
) -> list[str]:
    """The fields in which a draft's config is not the one that training writes."""
    own = draft.draft_config
    expected = kind.config(vocab_size, aux_layer_ids, own.get("mask_token_id", 0))
    return sorted(n for n in expected.keys() | own.keys() if expected.get(n) != own.get(n))


def read_exported(folder: Path) -> TrainingCheckpoint:
    """Step 0 of a draft that `export` wrote, with its whitening folded in, and without what was
    measured on its weights.

    Raises:
        DataError: when there is none.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
        offsets = tensors.pop("d2t")
    except Exception as error:  # safetensors has its own exception class
        raise DataError(f"{folder} is no exported draft: {error}") from error
    tensors.pop("t2d", None)
    config.pop("torch_dtype", None)
    for measured in ("draft_temperature_scale", "expected_acceptance_length"):
        config.pop(measured, None)
    vocabulary = offsets + torch.arange(len(offsets))
    weights = {f"weight.{name}": tensor.float() for name, tensor in tensors.items()}
    return TrainingCheckpoint(config, {}, Progress(), vocabulary, weights)


def anew(
    kind: DraftKind,
    vocab_size: int | None,
    texts: Sequence[Example],
    features: FeatureSource,
    parts: TargetParts,
    seed: int,
) -> TrainingCheckpoint:
    """Step 0, with a new vocabulary, whitening and initial weights."""
    order = _shuffled(texts, seed)
    soft, guess = _look_at(order, features, parts)
    counts = count_tokens((t.token_ids[t.mask] for t in texts), len(parts.head), soft)
    size = DEFAULT_DRAFT_VOCAB_SIZE if vocab_size is None else vocab_size
    vocabulary = choose_vocabulary(counts, size)
    logger.info(
        "%d texts, %d trained tokens; %d draft tokens cover %.2f %% of them",
        len(texts),
        sum(int(t.mask.sum()) for t in texts),
        len(vocabulary),
        100 * float(counts[vocabulary].sum() / counts.sum()),
    )
    raw = kind.config(len(vocabulary), features.aux_layer_ids, int(counts.argmin()))
    whitening = whitening_matrix(_sample_aux(order, features))
    draft = kind.network(raw, parts.embedding, whitening, 1)
    kind.initialise(
        draft, guess, parts, parts.head[vocabulary].float(), torch.Generator().manual_seed(seed)
    )
    tensors = {f"weight.{name}": weight.data for name, weight in draft.named_parameters()}
    tensors["whitening"] = whitening
    return TrainingCheckpoint(raw, {}, Progress(), vocabulary, tensors)


def _shuffled(texts: Sequence[Example], seed: int) -> list[Example]:
    order = list(texts)
    random.Random(f"fit {seed}").shuffle(order)
    return order


def _skipped(text: Example) -> int:
    return min(SKIPPED_ROWS, len(text) // 2)


def _sample_aux(texts: Sequence[Example], features: FeatureSource) -> torch.Tensor:
    """[N, A * hidden] states of the first texts."""
    sample: list[torch.Tensor] = []
    for text in texts:
        (states,) = features.features([text])
        width = states.shape[1] * len(features.aux_layer_ids) // (len(features.aux_layer_ids) + 1)
        sample.append(states[_skipped(text) :, :width].float())
        if sum(map(len, sample)) >= _COUNTED_ROWS:
            break
    return torch.cat(sample)


def _look_at(
    texts: Sequence[Example], features: FeatureSource, parts: TargetParts
) -> tuple[torch.Tensor, LinearGuess]:
    """The target's token probabilities, and the linear prediction."""
    hidden = parts.embedding.shape[1]
    guess = LinearGuess(len(features.aux_layer_ids) * hidden, hidden)
    soft = torch.zeros(len(parts.head), dtype=torch.float64)
    head = parts.head.float()
    rows = counted = 0
    for start in range(0, len(texts), 16):
        chosen = texts[start : start + 16]
        for text, states in zip(chosen, features.features(chosen), strict=True):
            skip = _skipped(text)
            aux, final = states[:, :-hidden].float(), states[:, -hidden:]
            embeds = F.embedding(text.token_ids[skip + 1 : -1].long(), parts.embedding).float()
            guess.add(aux[skip:-1], embeds, final[skip + 1 :].float() / parts.final_norm)
            rows += len(embeds)
            if counted < _COUNTED_ROWS:
                written = final[text.mask[1:]]
                soft += soft_counts(written.float(), head)
                counted += len(written)
        if rows >= _FIT_ROWS:
            break
    return soft, guess
