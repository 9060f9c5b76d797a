"""The tokens that end an answer: whatever in a model's folder names one.

Fine-tunes keep the generation config of their base model, tokenizers name one token, and templates
end turns with another: an answer ends at each of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from atom.config import ConfigError, ModelOptions
from atom.model_loader.quantization import config_levels
from atom.model_loader.read_files import read_tokenizer
from atom.model_loader.tokenizers.chat_template import render_chat_template
from atom.model_loader.tokenizers.plain_tokenizer import NAMED_TOKENS, is_plain, read_chat_templates
from atom.models.config.file import check_regular, is_there, read_json_object

# GGUF files name one token that ends a text; llama.cpp knows the others by these texts.
_ENDS_IN_GGUF_FILES = (
    "</s>",
    "<EOT>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|call|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|return|>",
    "[EOS]",
    "[EOT]",
    "_<EOT>",
)
# What no template writes by itself.
_ANSWER = "The answer of an assistant."


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct):
    """What is read of a `tokenizer.json`."""

    added_tokens: list[_AddedToken] = []


def end_token_ids(
    folder: Path, raw: dict[str, Any], options: ModelOptions, vocab_size: int
) -> frozenset[int]:
    """The union of the generation config's (else the configuration's) end tokens, the tokenizer's
    and that with which the chat template ends the assistant's turn; of a converted GGUF file also
    those that are known by their texts.

    Args:
        raw: the content of the folder's `config.json`.
        vocab_size: of the model, which cannot generate tokens of the tokenizer behind it.

    Raises:
        ConfigError: when a file cannot be read, or names no tokens of the vocabulary.
    """
    stated = _stated(folder, raw)
    if wrong := sorted(i for i in stated if not 0 <= i < vocab_size):
        raise ConfigError(
            f"{folder} of type {raw.get('model_type')}: a text ends with token {wrong[0]} "
            f"(eos_token_id), and the vocabulary has tokens 0 to {vocab_size - 1}"
        )
    path = folder / "tokenizer_config.json"
    if not is_there(path):
        return stated
    config = read_json_object(path)
    special = _special_tokens(folder, config)
    texts = {_text(config.get("eos_token")), _end_of_turn(folder, config, special)}
    if is_plain(folder):
        texts.update(_ENDS_IN_GGUF_FILES)
    found = {special[text] for text in texts if text in special}
    if not stated and not found:
        token_id = read_tokenizer(folder, options.trust_remote_code).eos_token_id
        found = set() if token_id is None else {token_id}
    return stated | {token_id for token_id in found if 0 <= token_id < vocab_size}


def _stated(folder: Path, raw: dict[str, Any]) -> frozenset[int]:
    path = folder / "generation_config.json"
    generation = read_json_object(path) if is_there(path) else {}
    for level in (generation, *config_levels(raw)):
        stated = level.get("eos_token_id")
        if stated is not None:
            ids = stated if isinstance(stated, list) else [stated]
            if not all(type(token_id) is int for token_id in ids):
                raise ConfigError(f"{folder}: eos_token_id should be integers, got {stated!r}")
            return frozenset(ids)
    return frozenset()


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Ids of special tokens by their texts, without loading the tokenizer."""
    path = folder / "tokenizer.json"
    if is_there(path):
        check_regular(path)
        try:
            tokenizer = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
        except (msgspec.MsgspecError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        return {token.content: token.id for token in tokenizer.added_tokens if token.special}
    listed = config.get("added_tokens_decoder")
    found = {}
    for name, token in (listed if isinstance(listed, dict) else {}).items():
        if isinstance(token, dict) and token.get("special") and name.isdecimal():
            found[str(token.get("content"))] = int(name)
    return found


def _text(token: object) -> str | None:
    """A token of `tokenizer_config.json`: its text, or an object with it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _end_of_turn(folder: Path, config: dict[str, Any], special: dict[str, int]) -> str | None:
    """The special token that the chat template writes behind what an assistant said."""
    template = read_chat_templates(folder, config)
    if isinstance(template, dict):
        template = template.get("default")
    if template is None:
        return None
    texts = {name: _text(config.get(name)) for name in NAMED_TOKENS}
    named: dict[str, Any] = {name: text for name, text in texts.items() if text is not None}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render_chat_template(template, chat, **named)
    except Exception:  # a program of others; requests say what is wrong with it
        return None
    _, answer, rest = text.rpartition(_ANSWER)
    rest = rest.lstrip()
    ends = [token for token in special if token and rest.startswith(token)] if answer else []
    return max(ends, key=len, default=None)
