"""`calibrate`: find the temperature at which a draft's logits race best."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig

from atom.config import EngineConfig
from atom.model_engine.arg_utils import (
    add_engine_flags,
    engine_config,
    engine_options,
    speculation_of,
)
from atom.model_loader.source import ModelSource, resolve_model
from atom.options.fields import check_at_least
from atom.platform import select_platform
from atom.processors import default_num_threads
from atom_train.checkpoint import TrainingCheckpoint
from atom_train.data.batches import BatchBuilder
from atom_train.data.dataset import Dataset, Example, Manifest, replace_file
from atom_train.data.held_out import HeldOut
from atom_train.data.prompts import DataError
from atom_train.data.target_probs import TargetProbabilities
from atom_train.kinds import DraftKind, kind_of
from atom_train.start import differences, read_exported
from atom_train.target_parts import load_target_parts
from atom_train.train import feature_source

HELP = "find the temperature at which a draft's logits race best, and write it into its config"

_FIELD = "draft_temperature_scale"
_SCALES = (0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 1.2)
_DEFAULT_DEPTH = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("draft", type=Path, help="folder that export wrote")
    add(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        help="folders that synthesize wrote, of texts that the draft was not trained on",
    )
    add("--scales", type=float, nargs="+", default=_SCALES, help="of the temperature, to compare")
    add("--temperature", type=float, default=1.0, help="of the texts that count (default: 1)")
    add("--limit", type=int, help="texts that count")
    add(
        "--depth",
        type=int,
        help=f"drafts of an Eagle3 draft (default: {_DEFAULT_DEPTH}); a block drafter has its own",
    )
    add("--dry-run", action="store_true", help="only print the table")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> None:
    """Raises:
    DataError: for unusable texts, or a draft that training does not make.
    ConfigError: for a target that cannot be loaded, or a size less than 1.
    """
    given = engine_options(args)
    if speculation_of(given):
        raise DataError("the draft is the first argument; calibration takes no speculative option")
    if args.temperature <= 0 or min(args.scales) <= 0:
        raise DataError("only sampled texts tell: temperature and scales must be positive")
    for flag, size in (("--limit", args.limit), ("--depth", args.depth)):
        if size is not None:
            check_at_least(flag, size, 1)
    scales = sorted({*args.scales})
    config = engine_config(**given)
    source = resolve_model(config.model)
    target = source.hf_config.get_text_config()
    _check_filters(args.data)
    exported = _Exported.read(args.draft, target, args.depth)
    dataset = Dataset.read(args.data, source.name, target.vocab_size)
    texts = _answers(dataset, args.temperature, args.limit)
    held_out = _held_out(config, source, exported, dataset, texts)
    right = held_out.race(args.temperature, scales)
    if not right.shape[2]:
        raise DataError(f"no answer is as long as {exported.depth} drafts: nothing can be measured")
    print(f"{len(texts)} texts at T = {args.temperature:g}, {right.shape[2]} rows")
    print(table(scales, right))
    best = scales[int(_kept(right).argmax())]
    if args.dry_run:
        print(f"best: {best:g}; nothing is written")
    else:
        _write(args.draft / "config.json", best)


def _write(path: Path, best: float) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    before = raw.get(_FIELD, 1.0)
    replace_file(path, (json.dumps({**raw, _FIELD: best}, indent=2) + "\n").encode())
    print(f"{_FIELD} {best:g} is in {path}; it was {before:g}")


def table(scales: Sequence[float], right: torch.Tensor) -> str:
    """Tokens per forward at each scale, the shares of rows whose first drafts are right, and how
    far it is below the best scale, with the standard error of that difference.

    Args:
        right: [scales, depth, rows] bool, as `HeldOut.race` returns it.
    """
    kept = right.sum(1, dtype=torch.float64)
    lost = kept[int(_kept(right).argmax())] - kept
    errors = (lost.std(1, correction=0) / max(lost.shape[1], 1) ** 0.5).tolist()
    shares = right.double().mean(2).tolist()
    lines = ["scale  tokens per forward  below the best    first drafts right"]
    for scale, own, below, error in zip(scales, shares, lost.mean(1), errors, strict=True):
        each = " ".join(f"{share:.3f}" for share in own)
        tokens = 1 + sum(own)
        lines.append(f"{scale:<5g}  {tokens:18.3f}  {below:.4f} ± {error:.4f}  {each}")
    return "\n".join(lines)


def _kept(right: torch.Tensor) -> torch.Tensor:
    """[scales] float64, the mean number of drafts that are right."""
    return right.sum(1, dtype=torch.float64).mean(1)


@dataclass(frozen=True)
class _Exported:
    """Attributes:
    aux_layer_ids: boundary ids of the states that it reads.
    depth: drafts of a row.
    """

    checkpoint: TrainingCheckpoint
    kind: DraftKind
    aux_layer_ids: tuple[int, ...]
    depth: int

    @classmethod
    def read(cls, folder: Path, target: PretrainedConfig, depth: int | None) -> _Exported:
        """Raises:
        DataError: for a draft that training does not make for this target, or another depth.
        """
        checkpoint = read_exported(folder)
        raw = checkpoint.draft_config
        ids = raw.get("aux_hidden_state_layer_ids") or raw.get("eagle_config", {}).get(
            "eagle_aux_hidden_state_layer_ids", ()
        )
        kind, aux = kind_of(raw, target), tuple(ids)
        differing = differences(checkpoint, kind, len(checkpoint.vocabulary), aux)
        if differing:
            raise DataError(
                f"{folder} is no draft that training makes for this target: {', '.join(differing)}"
            )
        size: int | None = raw.get("block_size")
        if size is not None and depth not in (None, size):
            raise DataError(f"--depth {depth}: the drafter makes {size} drafts of a block")
        return cls(checkpoint, kind, aux, size or depth or _DEFAULT_DEPTH)


def _held_out(
    config: EngineConfig,
    source: ModelSource,
    exported: _Exported,
    dataset: Dataset,
    texts: Sequence[Example],
) -> HeldOut:
    """The draft, with some texts of the dataset to measure it."""
    parts = load_target_parts(config, source)
    features = feature_source(config, dataset, exported.aux_layer_ids, parts)
    platform = select_platform(config.device)
    if not platform.is_gpu:
        torch.set_num_threads(config.parallel.num_threads or default_num_threads())
    device, checkpoint, depth = platform.device, exported.checkpoint, exported.depth
    longest = max(map(len, texts)) + depth
    draft = exported.kind.network(
        checkpoint.draft_config, parts.embedding.to(device), None, longest
    ).to(device)
    draft.load_state_dict(checkpoint.weights())
    target = TargetProbabilities(parts.head.to(device), checkpoint.vocabulary.to(device))
    build = BatchBuilder(features, target, depth, 1, device).build
    unroll = partial(draft.unroll, depth=depth)
    return HeldOut(texts, build, unroll, draft.output_head, target)


def _answers(dataset: Dataset, temperature: float, limit: int | None) -> list[Example]:
    """The first texts of this temperature, with the answers alone as what was generated: turns that
    the target wrote itself were sampled in another way.

    Raises:
        DataError: when there is none, or where answers start is not known.
    """
    chosen = [text for text in dataset.texts if text.temperature == temperature][:limit]
    if not chosen:
        known = sorted({text.temperature for text in dataset.texts})
        raise DataError(f"no text was sampled at temperature {temperature:g}, but at {known}")
    answers = []
    for text in chosen:
        if text.answer_start is None:
            raise DataError("the texts do not say where answers start; write new ones")
        is_answer = torch.arange(len(text)) >= text.answer_start
        answers.append(replace(text, mask=text.mask & is_answer))
    return answers


def _check_filters(folders: Sequence[Path]) -> None:
    """Raises:
    DataError: for texts that were not sampled from the whole distribution.
    """
    for folder in folders:
        top_p = Manifest.read(folder).settings.get("top_p", 1.0)
        if top_p != 1.0:
            raise DataError(f"{folder} was sampled with --top-p {top_p:g}; write texts without")
