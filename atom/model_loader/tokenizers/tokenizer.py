"""Loads a model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from atom.config import ConfigError, ModelOptions
from atom.model_loader.hub import download_tokenizer, looks_like_path
from atom.model_loader.read_files import read_tokenizer
from atom.model_loader.tokenizers.default_templates import DEFAULT_TEMPLATES
from atom.model_loader.tokenizers.plain_tokenizer import (
    PlainTokenizer,
    is_plain,
    plain_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FoundModel(Protocol):
    """What tokenizers are loaded by.

    Attributes:
        path: local folder in Hugging Face format.
        model_type: of its configuration.
    """

    @property
    def path(self) -> Path: ...
    @property
    def model_type(self) -> str: ...


def load_text_tokenizer(
    source: FoundModel, options: ModelOptions
) -> PlainTokenizer | PreTrainedTokenizerBase:
    """A tokenizer that encodes, decodes and renders chats as the model's, loaded fast if it can be.

    Raises:
        ConfigError: when there is none or it cannot be loaded.
    """
    if options.tokenizer is None and is_plain(source.path):
        tokenizer = plain_tokenizer(source.path)
        tokenizer.chat_template = tokenizer.chat_template or _default_template(source)
        return tokenizer
    return load_tokenizer(source, options)


def load_tokenizer(source: FoundModel, options: ModelOptions) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or the one given by --tokenizer, as transformers reads it.

    Raises:
        ConfigError: when there is none or it cannot be loaded.
    """
    tokenizer = read_tokenizer(tokenizer_folder(source, options), options.trust_remote_code)
    tokenizer.chat_template = tokenizer.chat_template or _default_template(source)
    return tokenizer


def _default_template(source: FoundModel) -> str | None:
    return DEFAULT_TEMPLATES.get(source.model_type)


def tokenizer_folder(source: FoundModel, options: ModelOptions) -> Path:
    """Where the tokenizer of a model is: in its folder, or where --tokenizer says."""
    return locate_tokenizer(source.path, options)


def locate_tokenizer(folder: Path, options: ModelOptions) -> Path:
    """The same of a model that lies in `folder`."""
    return folder if options.tokenizer is None else _locate(options.tokenizer, options)


def _locate(tokenizer: str, options: ModelOptions) -> Path:
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        return path
    if path.exists() or looks_like_path(tokenizer):
        raise ConfigError(f"there is no tokenizer folder {tokenizer}")
    return download_tokenizer(tokenizer, options)
