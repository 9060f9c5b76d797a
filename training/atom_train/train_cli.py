"""The flags of `train`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from atom.model_engine.arg_utils import (
    add_engine_flags,
    engine_config,
    engine_options,
    speculation_of,
)
from atom_train.data.prompts import DataError
from atom_train.options import TrainOptions
from atom_train.plot import plot_log
from atom_train.start import DEFAULT_DRAFT_VOCAB_SIZE
from atom_train.train import TrainRequest, train
from atom_train.trainer import LOG

HELP = "fit a draft to datasets of its target; resumes a run that was stopped"

_HELP = {
    "epochs": "passes over the data, not necessarily whole",
    "rows_per_batch": "drafting rows of a batch",
    "accumulate": "batches of an optimiser step",
    "depth": "draft steps that are unrolled; rows of a block drafter's blocks",
    "step_decay": "weight of each unrolled step relative to the one before",
    "l1_weight": "share of |p - q| in the loss; the rest is soft cross-entropy",
    "lr": "peak rate of AdamW",
    "lr_fc": "peak rate of fc",
    "lr_head": "peak rate of the output head; 0 freezes it",
    "warmup": "share of the steps in which the rates rise",
    "clip": "largest norm of the gradients",
    "num_targets": "entries kept of each target distribution",
    "num_negatives": "candidates sampled for the loss's normaliser; all tokens when not given",
    "held_out": "share of the texts that only measure",
    "log_every": "steps between lines of the log",
    "save_every": "steps between checkpoints",
}


# Flags that only one kind of draft has.
_SHAPE = {"attention": "eagle3", "layers": "block", "markov_rank": "block"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="folders that synthesize wrote")
    add("--output", type=Path, required=True, help="folder of the run; resumed when begun")
    add("--draft", choices=("eagle3", "block"), default="eagle3", help="kind (default: eagle3)")
    add("--attention", choices=("mha", "mla"), help="of an Eagle3 draft (default: mha)")
    add("--layers", type=int, help="of a block drafter (default: 1)")
    add("--markov-rank", type=int, help="of a block drafter (default: 64)")
    add(
        "--draft-vocab-size",
        type=int,
        help=f"tokens that the draft knows (default: {DEFAULT_DRAFT_VOCAB_SIZE})",
    )
    add(
        "--initial-draft",
        type=Path,
        help="train this draft further, on this data: exported, or another run's folder",
    )
    add("--aux-layer-ids", type=int, nargs="+", help="boundary ids of the states it reads")
    add("--workers", type=int, default=1, help="batches of a step computed at a time")
    add("--compute-dtype", choices=("float32", "bfloat16"), default="float32")
    for option in dataclasses.fields(TrainOptions):
        if option.name in _HELP:
            default = option.default
            kind = int if default is None or isinstance(default, int) else float
            add(
                f"--{option.name.replace('_', '-')}",
                type=kind,
                default=default,
                help=_HELP[option.name] + ("" if default is None else " (default: %(default)s)"),
            )
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> None:
    """Raises what `train` raises."""
    given = engine_options(args)
    if speculation_of(given):
        raise DataError("training makes a draft; it takes none")
    if args.workers > args.accumulate:
        raise DataError(
            f"--workers {args.workers} needs --accumulate {args.workers} or more: each worker "
            f"computes a batch of its own"
        )
    shape = _shape(args)
    options = TrainOptions(
        **{name: getattr(args, name) for name in _HELP},
        dtype=args.compute_dtype,
        seed=args.seed or 0,
    )
    train(
        TrainRequest(
            engine_config(**given),
            options,
            tuple(args.data),
            args.output,
            draft=args.draft,
            draft_vocab_size=args.draft_vocab_size,
            aux_layer_ids=None if args.aux_layer_ids is None else tuple(args.aux_layer_ids),
            initial_draft=args.initial_draft,
            workers=args.workers,
            **shape,
        )
    )
    picture = plot_log(args.output / LOG, args.output / "training.png")
    print(f"trained; the curves are in {picture}" if picture else "trained")


def _shape(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of `_SHAPE`.

    Raises:
        DataError: for a flag of another kind of draft.
    """
    given = {name: getattr(args, name) for name in _SHAPE if getattr(args, name) is not None}
    for name in given:
        if _SHAPE[name] != args.draft:
            flag = name.replace("_", "-")
            raise DataError(f"--{flag} is for --draft {_SHAPE[name]}, not --draft {args.draft}")
    return given
