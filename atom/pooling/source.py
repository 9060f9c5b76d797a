"""Finds out whether a model embeds or scores, before anything of an engine is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atom.config import ConfigError, EngineConfig, ModelOptions
from atom.model_loader.gguf.pooling import pooled_file
from atom.model_loader.locate import locate_model
from atom.model_loader.pooling_task import pooling_task
from atom.model_loader.read_files import check_folder
from atom.models.config.check import check_config
from atom.models.config.file import is_there, read_json_object
from atom.options.fields import options_of

# Of the engine's options, those that mean something without generating.
_OPTIONS = frozenset(
    (
        *("model", "tokenizer", "revision", "trust_remote_code", "dtype", "task"),
        *("is_matryoshka", "max_model_len", "max_num_batched_tokens", "max_num_seqs"),
        *("num_threads", "device"),
    )
)


@dataclass(frozen=True)
class PoolingSource:
    """A checkpoint that embeds or scores.

    Attributes:
        path: local folder in Hugging Face format.
        name: as the user gave it.
        task: `embed` or `score`.
        raw: the content of its config.json.
    """

    path: Path
    name: str
    task: str
    raw: dict[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.raw.get("model_type"))


def pooling_source(config: EngineConfig) -> PoolingSource | None:
    """The checkpoint; None where the model generates.

    Raises:
        ConfigError: when there is no such model, its files cannot be what is asked for, or an
            option is given that is for generation alone.
    """
    options = config.model
    if options.model is None:
        if options.task in ("embed", "score"):
            raise ConfigError(f"task is {options.task}: name a model; the embedded one generates")
        return None
    if options.task == "generate":
        return None
    folder = locate_model(options.model, options)
    if (task := pooling_task(folder, options)) is None:
        return None
    _refuse_options(config, options.model, task)
    if not is_there(folder / "config.json"):
        folder = _converted(folder, options)
    check_folder(folder)
    path = folder / "config.json"
    raw = read_json_object(path)
    check_config(raw, str(path))
    return PoolingSource(folder, options.model, task, raw)


def _converted(location: Path, options: ModelOptions) -> Path:
    """The folder that a GGUF file is converted to, with plain numbers."""
    from atom.model_loader.source import from_gguf

    path = pooled_file(location)
    assert path is not None
    folder, _ = from_gguf(path, replace(options, quantization="none"))
    return folder


def _refuse_options(config: EngineConfig, name: str, task: str) -> None:
    """Options of generation are refused where they have another value than their default."""
    given = []
    for option in options_of(EngineConfig):
        if option.name in _OPTIONS or option.is_document:
            continue
        group: Any = config if option.group is None else getattr(config, option.group)
        # The last one is what LLM has for max_logprobs.
        defaults = (option.default, option.declared.on_gpu, -1)
        if group is not None and getattr(group, option.field.name) not in defaults:
            given.append(option.flag)
    if given:
        raise ConfigError(
            f"{name} is a model to {task} texts, and {', '.join(sorted(given))} "
            f"{'is' if len(given) == 1 else 'are'} for models that generate; leave "
            f"{'it' if len(given) == 1 else 'them'} out"
        )
