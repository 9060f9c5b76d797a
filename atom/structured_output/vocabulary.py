"""A tokenizer's vocabulary for grammars: the bytes of each token, and the markers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from atom.structured_output.base import GrammarError
from atom.structured_output.xgrammar_import import import_xgrammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Surrounds a marker's spelling. No text contains this byte, so strings and patterns cannot contain
# markers.
_NOT_TEXT = b"\xff"


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that compilation depends on besides the grammar.

    Attributes:
        tokens: the bytes of each token id of the logits, including padding.
        markers: ids of added tokens (special ones, and such as `<tool_call>`) by text; they never
            count as text.
        stop_token_ids: tokens that may end a complete text; at least one.
        add_prefix_space: whether the tokenizer adds a space before a text.
    """

    tokens: list[bytes]
    markers: dict[str, int]
    stop_token_ids: list[int]
    add_prefix_space: bool


def read_vocabulary(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Iterable[int]
) -> Vocabulary:
    """Read the vocabulary of a tokenizer.

    Args:
        vocab_size: of the model's logits, including padding.
        eos_token_ids: tokens that may end a complete text.

    Raises:
        GrammarError: when there is no EOS token, xgrammar is not installed, or it cannot read the
            tokenizer.
    """
    stops = sorted(eos_token_ids)
    if not stops:
        raise GrammarError("structured output needs a model with an end token; it has none")
    xgrammar = import_xgrammar()
    try:
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=stops
        )
    except (ValueError, RuntimeError) as error:
        raise GrammarError(f"xgrammar cannot read the tokenizer: {error}") from error
    tokens = [bytes(token) for token in info.decoded_vocab]
    markers: dict[str, int] = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token_id < vocab_size and token.content.strip() and token_id not in stops:
            markers[token.content] = token_id
            tokens[token_id] = _NOT_TEXT + token.content.encode() + _NOT_TEXT
    return Vocabulary(
        tokens=tokens,
        markers=markers,
        stop_token_ids=stops,
        add_prefix_space=info.add_prefix_space,
    )
