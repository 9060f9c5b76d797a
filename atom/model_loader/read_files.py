"""Checks the small files of a model folder before transformers opens them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from atom.config import ConfigError
from atom.models.config.file import check_regular, is_there, read_json, read_json_object
from atom.models.config.hf_configs import is_built_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Also what transformers opens when it reads a configuration and a tokenizer.
_OPENED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
# One of these is in every published tokenizer; tokenizer_config.json alone names only its class.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
_PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
_TEMPLATES = ("*.jinja", "additional_chat_templates/*.jinja")
# Small JSON files that Python parses; too deep nesting would raise without naming the file.
_PARSED = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
)


def check_folder(folder: Path) -> None:
    """Refuse files that would block, never end or crash a parser.

    Raises:
        ConfigError: with the file that is not regular or has no valid JSON.
    """
    paths = [folder / name for name in _OPENED]
    for path in [*paths, *(path for pattern in _TEMPLATES for path in folder.glob(pattern))]:
        if is_there(path):
            check_regular(path)
    for path in (folder / name for name in _PARSED):
        if is_there(path):
            read_json(path)


def read_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder.

    Raises:
        ConfigError: when there is none or it cannot be loaded.
    """
    check_folder(folder)
    if not has_tokenizer(folder):
        raise ConfigError(
            f"{folder} holds no tokenizer (none of {', '.join(_TOKENIZERS)}); copy the model's "
            f"there, or name one with --tokenizer FOLDER_OR_HUB_ID"
        )
    try:
        if _is_plain(folder):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder)
        # Reads the source of every model in transformers, so only for what needs it.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # each tokenizer class raises its own kinds
        raise ConfigError(f"no tokenizer could be loaded from {folder}: {error}") from error


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer, of whatever kind."""
    return any(is_there(folder / name) for name in _TOKENIZERS)


def _is_plain(folder: Path) -> bool:
    """Whether tokenizer.json says all, and `AutoTokenizer` would come to the same class."""
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json", "config.json")]
    if not all(is_there(path) for path in files):
        return False
    tokenizer, model = (read_json_object(path) for path in files[1:])
    plain = tokenizer.get("tokenizer_class") in _PLAIN and "auto_map" not in tokenizer
    return plain and is_built_in(model.get("model_type"))
