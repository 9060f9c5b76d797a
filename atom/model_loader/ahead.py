"""What a start reads of a model while it imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atom import torch_start
from atom.config import ModelOptions
from atom.environment import cache_dir
from atom.model_loader.gguf.content import hash_ahead
from atom.model_loader.gguf.split import split_paths
from atom.model_loader.locate import converted_before, likely_files
from atom.model_loader.packed_file import read_ahead
from atom.model_loader.tokenizers.plain_tokenizer import read_plain_ahead
from atom.processors import default_num_threads


def begin(options: ModelOptions) -> None:
    """For programs that have their process to themselves, before anything imports torch.

    Raises:
        ConfigError: when no model is named, and the embedded one is not installed.
    """
    torch_start.begin()
    begin_files(likely_files(options))
    folder = converted_before(options)
    if folder is not None and options.tokenizer is None:
        read_plain_ahead(folder)


def begin_files(files: Sequence[Path]) -> None:
    """Read `likely_files`; packed ones only where torch is not for GPUs, whose kernels read others.

    Threads are one less than processors, since another imports meanwhile.
    """
    num_threads = max(1, default_num_threads() - 1)
    for path in files:
        if path.suffix == ".gguf":
            hash_ahead(split_paths(path), cache_dir() / "gguf", num_threads)
        elif not torch_start.is_for_gpus():
            read_ahead(path, num_threads)
