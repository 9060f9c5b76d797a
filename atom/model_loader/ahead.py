"""What a start needs of a converted model, read while it imports torch."""

from __future__ import annotations

from pathlib import Path

from atom import torch_start
from atom.config import ModelOptions
from atom.model_loader.gguf.cache import packed_files
from atom.model_loader.locate import converted_before
from atom.model_loader.packed_file import read_ahead
from atom.model_loader.tokenizers.plain_tokenizer import read_plain_ahead


def begin(options: ModelOptions) -> None:
    """For programs that have their process to themselves, before anything imports torch.

    Raises:
        ConfigError: when no model is named, and the embedded one is not installed.
    """
    torch_start.begin()
    folder = converted_before(options)
    if folder is not None:
        begin_weights(packed_files(folder)[:1])
        if options.tokenizer is None:
            read_plain_ahead(folder)


def begin_weights(files: list[Path]) -> None:
    """Read files of packed weights, unless torch is for GPUs, whose kernels read others."""
    if not torch_start.is_for_gpus():
        for path in files:
            read_ahead(path)
