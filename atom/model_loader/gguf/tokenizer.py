"""A GGUF file's vocabulary as Hugging Face tokenizer files.

The metadata only names the pre-tokenizer (`tokenizer.ggml.pre`). A wrong one would encode texts
into other tokens than those of training, without an error, so unknown names are refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from atom.config import ConfigError
from atom.model_loader.errors import WeightError, name_some
from atom.model_loader.gguf.bert import word_pieces
from atom.model_loader.gguf.file import GGUFFile
from atom.model_loader.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from atom.model_loader.tokenizers.plain_tokenizer import MARK, NAMED_TOKENS

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
# Limits the cost of `_merges_of_scores`, which tries every split of a token.
_LONGEST_TOKEN = 4096
_SPACE = "\u2581"


@dataclass(frozen=True)
class _Vocabulary:
    """Attributes:
    tokens: the text of each token id.
    types: the type of each token id: one of the constants above, or 1 for normal tokens.
    """

    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, file: GGUFFile) -> _Vocabulary:
        tokens = file.metadata.require_list("tokenizer.ggml.tokens", str)
        types = file.metadata.require_list("tokenizer.ggml.token_type", int)
        if len(tokens) != len(types):
            raise WeightError(f"{file.path}: {len(tokens)} tokens, but {len(types)} token types")
        if longest := [token for token in tokens if len(token) > _LONGEST_TOKEN]:
            raise WeightError(
                f"{file.path}: token {longest[0][:20]!r}... has {len(longest[0])} characters; at "
                f"most {_LONGEST_TOKEN} are read"
            )
        # Unused tokens at the end are padding of the embedding.
        end = len(tokens)
        while end and types[end - 1] == _UNUSED:
            end -= 1
        tokens, types = tokens[:end], types[:end]
        if len(set(tokens)) != len(tokens):
            twice = [token for token, count in Counter(tokens).items() if count > 1]
            raise WeightError(f"{file.path}: tokens occur twice: {name_some(twice)}")
        return cls(tokens, types)

    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def of_types(self, *types: int) -> list[str]:
        return [t for t, kind in zip(self.tokens, self.types, strict=True) if kind in types]


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat templates, if any.

    Raises:
        ConfigError: for an unsupported tokenizer or pre-tokenizer.
        WeightError: when the metadata is incomplete or inconsistent.
    """
    vocabulary = _Vocabulary.read(file)
    kind = file.metadata.require("tokenizer.ggml.model", str)
    if kind == "gpt2":
        pre = _pre_tokenizer(file)
        tokenizer, adds_bos = _byte_level(file, vocabulary, pre), pre.adds_bos
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(file, vocabulary), True
    elif kind == "bert":
        no_pieces = frozenset(vocabulary.of_types(_CONTROL, _UNKNOWN))
        tokenizer, adds_bos = word_pieces(file, vocabulary.ids(), no_pieces), False
    else:
        raise ConfigError(
            f"{file.path}: tokenizer {kind!r} is not supported in GGUF files; supported are gpt2, "
            f"llama and bert. Pass --tokenizer"
        )
    config = _tokenizer_config(file, vocabulary, adds_bos, is_framed=kind == "bert")
    named = [token for name, token in config.items() if name in NAMED_TOKENS]
    special = dict.fromkeys([*vocabulary.of_types(_CONTROL, _UNKNOWN), *named])
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token in vocabulary.of_types(_USER_DEFINED)
            if token not in special
        ]
    )
    if tokenizer.post_processor is None:
        tokenizer.post_processor = _post_processor(config, vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    _write_chat_templates(file, folder)


def _pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    name = file.metadata.get("tokenizer.ggml.pre", str)
    if name is None or name not in PRE_TOKENIZERS:
        given = "names no pre-tokenizer" if name is None else f"has the pre-tokenizer {name!r}"
        raise ConfigError(
            f"{file.path} {given}; supported in GGUF files are {', '.join(PRE_TOKENIZERS)}. "
            f"Pass --tokenizer with the folder or hub id of the model's own tokenizer"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(file: GGUFFile, vocabulary: _Vocabulary, pre: PreTokenizer) -> Tokenizer:
    """Byte-level BPE."""
    merges = []
    for merge in file.metadata.require_list("tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    try:
        model = models.BPE(vocabulary.ids(), merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises nothing more specific
        raise WeightError(f"{file.path}: the merges do not fit the vocabulary: {error}") from None
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, encode])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE, with byte fallback."""
    ids = vocabulary.ids()
    merges = _merges_of_scores(file, vocabulary, ids)
    unknown = next(iter(vocabulary.of_types(_UNKNOWN)), None)
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=bool(vocabulary.of_types(_BYTE)),
        )
    )
    prefixed = file.metadata.get("tokenizer.ggml.add_space_prefix", bool, True)
    prepend = [normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_of_scores(
    file: GGUFFile, vocabulary: _Vocabulary, ids: dict[str, int]
) -> list[tuple[str, str]]:
    """Reconstruct the merges from scores: pieces with higher scores merge first."""
    scores = file.metadata.require_list("tokenizer.ggml.scores", float)
    if len(scores) < len(vocabulary.tokens):
        raise WeightError(f"{file.path}: {len(vocabulary.tokens)} tokens, but {len(scores)} scores")
    normal = [i for i, kind in enumerate(vocabulary.types) if kind not in (_CONTROL, _BYTE)]
    merges = []
    for i in sorted(normal, key=lambda i: -scores[i]):
        piece = vocabulary.tokens[i]
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _tokenizer_config(
    file: GGUFFile, vocabulary: _Vocabulary, adds_bos: bool, is_framed: bool
) -> dict[str, Any]:
    """Args:
    is_framed: whether the tokenizer frames texts by itself.
    """
    metadata = file.metadata
    config: dict[str, Any] = {
        "tokenizer_class": "TokenizersBackend",
        MARK: "gguf",
        "model_max_length": metadata.require(f"{file.architecture}.context_length", int),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", bool, adds_bos),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", bool, False),
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, key in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id", int)
        if token_id is None:
            continue
        if not 0 <= token_id < len(vocabulary.tokens):
            raise WeightError(
                f"{file.path}: the {key} token is {token_id} of {len(vocabulary.tokens)} tokens"
            )
        config[f"{name}_token"] = vocabulary.tokens[token_id]
    for name in () if is_framed else ("bos", "eos"):
        if config[f"add_{name}_token"] and f"{name}_token" not in config:
            raise WeightError(f"{file.path} adds a {name} token to every text, but has none")
    return config


def _post_processor(
    config: dict[str, Any], vocabulary: _Vocabulary
) -> processors.TemplateProcessing:
    bos = config["bos_token"] if config["add_bos_token"] else None
    eos = config["eos_token"] if config["add_eos_token"] else None
    ids = vocabulary.ids()
    first = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    second = [*([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    return processors.TemplateProcessing(
        single=first,
        pair=[*first, *second],
        special_tokens=[(token, ids[token]) for token in (bos, eos) if token],
    )


def _write_chat_templates(file: GGUFFile, folder: Path) -> None:
    main = "tokenizer.chat_template"
    template = file.metadata.get(main, str)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    others = [key for key in file.metadata if key.startswith(f"{main}.")]
    if others:
        named = folder / "additional_chat_templates"
        named.mkdir()
        for key in others:
            name = key.removeprefix(f"{main}.")
            if not re.fullmatch(r"[\w.-]{1,64}", name):
                raise WeightError(f"{file.path}: a chat template is called {name[:80]!r}")
            text = file.metadata.require(key, str)
            (named / f"{name}.jinja").write_text(text, encoding="utf-8")
