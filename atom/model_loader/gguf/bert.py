"""BERT in GGUF files: its configuration and its tokenizer.

Source: llama.cpp's converter, which writes pieces of a word's beginning with a mark and others
without, and its WordPiece, which lowers case and drops accents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from atom.config import ConfigError
from atom.model_loader.errors import WeightError
from atom.model_loader.gguf.file import GGUFFile

_BEGINNING = "\u2581"
_CONTINUES = "##"
# Keys of tokens, the first that a file has, and the text of it in a file without; the second
# spelling is llama.cpp's.
_NAMED = {
    "[CLS]": ("cls_token_id", "bos_token_id"),
    "[SEP]": ("separator_token_id", "seperator_token_id", "eos_token_id"),
    "[UNK]": ("unknown_token_id",),
}
_TABLES = ("token_embd", "position_embd", "token_types")


def bert_config(file: GGUFFile, dtype: torch.dtype) -> dict[str, Any]:
    """The content of `config.json`.

    Raises:
        ConfigError: for a model that is no encoder.
        WeightError: when a key or a table of embeddings is missing.
    """
    metadata, own = file.metadata, f"{file.architecture}."
    if metadata.get(own + "attention.causal", bool, False):
        raise ConfigError(f"{file.path}: {file.architecture} with attention.causal is no encoder")
    sizes = {}
    for name in _TABLES:
        table = file.tensors.get(f"{name}.weight")
        if table is None or len(table.shape) != 2:
            raise WeightError(f"{file.path} lacks the matrix {name}.weight")
        sizes[name] = table.shape[0]
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": metadata.require(own + "embedding_length", int),
        "intermediate_size": metadata.require(own + "feed_forward_length", int),
        "num_attention_heads": metadata.require(own + "attention.head_count", int),
        "num_hidden_layers": metadata.require(own + "block_count", int),
        "layer_norm_eps": metadata.require(own + "attention.layer_norm_epsilon", float),
        "vocab_size": sizes["token_embd"],
        "max_position_embeddings": sizes["position_embd"],
        "type_vocab_size": sizes["token_types"],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", int, 0),
        "dtype": str(dtype).removeprefix("torch."),
    }


def word_pieces(file: GGUFFile, ids: Mapping[str, int], special: frozenset[str]) -> Tokenizer:
    """WordPiece with the file's vocabulary; texts are framed by two tokens.

    Args:
        ids: of tokens as the file writes them.
        special: those that are no pieces.

    Raises:
        WeightError: without the tokens that frame texts, or that stands for unknown words.
    """
    pieces = {_piece(token, special): number for token, number in ids.items()}
    named = {number: token for token, number in pieces.items()}
    first, last, unknown = (_number(file, text, pieces) for text in _NAMED)
    if len(pieces) != len(ids) or not {first, last, unknown} <= named.keys():
        raise WeightError(f"{file.path}: its vocabulary is none of WordPiece")
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token=named[unknown]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not _has_case(pieces, special))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{named[first]} $A {named[last]}",
        pair=f"{named[first]} $A {named[last]} $B:1 {named[last]}:1",
        special_tokens=[(named[first], first), (named[last], last)],
    )
    return tokenizer


def _piece(token: str, special: frozenset[str]) -> str:
    if token in special:
        return token
    return token[1:] if token.startswith(_BEGINNING) else _CONTINUES + token


def _number(file: GGUFFile, text: str, pieces: Mapping[str, int]) -> int:
    stated = (file.metadata.get(f"tokenizer.ggml.{key}", int) for key in _NAMED[text])
    return next((number for number in stated if number is not None), pieces.get(text, -1))


def _has_case(pieces: Mapping[str, int], special: frozenset[str]) -> bool:
    """Whether any piece has a capital; those that are reserved stand in brackets."""
    return any(
        piece != piece.lower() for piece in pieces if piece not in special and piece[:1] != "["
    )
