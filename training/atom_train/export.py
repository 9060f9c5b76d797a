"""`export`: write a trained draft as a checkpoint in the public format."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save

from atom_train.checkpoint import TrainingCheckpoint, load_checkpoint
from atom_train.data.dataset import replace_file
from atom_train.data.prompts import DataError

HELP = "write a trained draft in the public checkpoint format"

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, help="folder of a training run, or one of its checkpoints")
    add("output", type=Path, help="folder to write; must not hold another draft")
    add("--dtype", choices=tuple(_DTYPES), default="bfloat16", help="of the weights")


def run(args: argparse.Namespace) -> None:
    """Raises what `export_draft` and `load_checkpoint` raise."""
    checkpoint = load_checkpoint(args.checkpoint)
    export_draft(checkpoint, args.output, _DTYPES[args.dtype])
    print(f"step {checkpoint.progress.step} is in {args.output}")


def export_draft(checkpoint: TrainingCheckpoint, folder: Path, dtype: torch.dtype) -> None:
    """Write `config.json` and `model.safetensors`.

    The whitening is folded into `fc`. The embedding is the target's and omitted.

    Raises:
        DataError: when the folder already has a checkpoint.
    """
    if (folder / "model.safetensors").exists():
        raise DataError(f"{folder} holds a checkpoint already; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    weights = checkpoint.weights()
    whitening = checkpoint.tensors.get("whitening")
    if whitening is not None:
        folded = weights["fc.weight"].double() @ whitening.double().T
        weights["fc.weight"] = folded.float()
    tensors = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
    vocabulary = checkpoint.vocabulary
    layer_config = checkpoint.draft_config.get("transformer_layer_config", checkpoint.draft_config)
    known = torch.zeros(layer_config["vocab_size"], dtype=torch.bool)
    known[vocabulary] = True
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    tensors["t2d"] = known
    replace_file(folder / "model.safetensors", save(tensors, {"format": "pt"}))
    config = {**checkpoint.draft_config, "torch_dtype": str(dtype).removeprefix("torch.")}
    replace_file(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
