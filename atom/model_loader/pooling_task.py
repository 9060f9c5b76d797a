"""Whether a checkpoint embeds or scores texts instead of generating, as its own files say.

sentence-transformers writes `modules.json`, the chain of modules that make a model's answer of its
hidden states, and a folder with the options of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom.config import ConfigError, ModelOptions
from atom.model_loader.gguf.pooling import pooled_file
from atom.models.config.file import is_there, read_json, read_json_object

MODULES = "modules.json"
_PACKAGE = "sentence_transformers."
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True)
class Module:
    """A link of the chain.

    Attributes:
        kind: name of its class, such as `Pooling`.
        folder: where its options are.
    """

    kind: str
    folder: Path


def read_modules(folder: Path) -> tuple[Module, ...]:
    """The chain of a checkpoint; empty without `modules.json`.

    Raises:
        ConfigError: for a file of another form, or a module of another package.
    """
    path = folder / MODULES
    if not is_there(path):
        return ()
    stated = read_json(path)
    if not isinstance(stated, list) or not stated:
        raise ConfigError(f"{path} should hold a list of modules")
    return tuple(_module(path, entry) for entry in stated)


def _module(path: Path, entry: Any) -> Module:
    kind, place = (
        (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
    )
    if not isinstance(kind, str) or not isinstance(place, str):
        raise ConfigError(f"{path}: a module should have a type and a path, got {entry!r}")
    if not kind.startswith(_PACKAGE):
        raise ConfigError(f"{path}: {kind} is code of the checkpoint's own, which is not run")
    if place.startswith("/") or ".." in Path(place).parts:
        raise ConfigError(f"{path}: {place} is not within the checkpoint")
    return Module(kind.rpartition(".")[2], path.parent / place)


def pooling_task(folder: Path, options: ModelOptions) -> str | None:
    """`embed` or `score`; None where the checkpoint generates.

    Args:
        folder: in Hugging Face format, or a GGUF file.

    Raises:
        ConfigError: when the checkpoint's files do not say what `options.task` asks for.
    """
    if options.task == "generate":
        return None
    if not is_there(folder / "config.json"):
        return _task_of_gguf(folder, options)
    raw = read_json_object(folder / "config.json")
    kinds = [module.kind for module in read_modules(folder)]
    stated = _stated_task(raw, kinds)
    if options.task == "auto":
        return stated
    if options.task == "embed" and stated != "embed":
        raise ConfigError(
            f"task is embed, and {folder} has no {MODULES} with a Pooling, which says how hidden "
            f"states become one vector"
        )
    if options.task == "score" and stated == "embed":
        raise ConfigError(
            f"task is score, and {folder} is an embedding model, whose scores are cosines of "
            f"vectors: leave task out, and ask for them"
        )
    return options.task


def _task_of_gguf(location: Path, options: ModelOptions) -> str | None:
    embeds = pooled_file(location) is not None
    if options.task in ("auto", "embed") and embeds:
        return "embed"
    if options.task != "auto":
        raise ConfigError(
            f"task is {options.task}, and {location} is no Hugging Face folder; GGUF files are "
            f"read that generate, and that embed with a pooling_type in their metadata"
        )
    return None


def _stated_task(raw: Mapping[str, Any], kinds: list[str]) -> str | None:
    if "Pooling" in kinds:
        return "embed"
    is_scorer = "LogitScore" in kinds or _architecture(raw).endswith(_CLASSIFIER)
    return "score" if is_scorer else None


def encoder_hint(raw: Mapping[str, Any]) -> str:
    """What an error adds about an architecture that may generate nothing."""
    if not _architecture(raw).endswith(("Model", "ForMaskedLM", "ForPreTraining")):
        return ""
    return (
        f". An encoder embeds texts where a {MODULES} says how its hidden states become one vector"
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    listed = raw.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else ""
    return first if isinstance(first, str) else ""
