"""Grammars by xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from atom.structured_output.base import Grammar, GrammarError, TokenMask
from atom.structured_output.bounded_strings import chain_bounded_strings
from atom.structured_output.params import StructuredOutput
from atom.structured_output.tags import as_format, lower_tokens

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

INSTALL_HINT = "pip install --no-deps 'xgrammar>=0.2.8,<0.3' && pip install apache-tvm-ffi pydantic"

# The byte around a marker token's spelling: no text holds it, so neither strings nor patterns
# can be continued with a marker.
_NOT_TEXT = b"\xff"
# Of a schema's format; with others it is not plain JSON.
_SCHEMA_KEYS = {"type", "json_schema", "max_whitespace_cnt"}
_LOCATION = re.compile(r"^\[[\d:]+\] \S+: ")


class XGrammarBackend:
    """Compiles for one tokenizer.

    Added tokens (special ones, and markers such as `<tool_call>`) never count as text: a
    grammar allows them only where it names them.

    Args:
        vocab_size: of the model's logits, padding included.
        eos_token_ids: what may end a complete text.

    Raises:
        GrammarError: when xgrammar is not installed or cannot read the tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        stops = sorted(eos_token_ids)
        if not stops:
            raise GrammarError("structured output needs a model with an end token; it has none")
        xgrammar = _import()
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocab_size, stop_token_ids=stops
            )
        except (ValueError, RuntimeError) as error:
            raise GrammarError(f"xgrammar cannot read the tokenizer: {error}") from error
        vocabulary = list(info.decoded_vocab)
        self._markers: dict[str, int] = {}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token_id < vocab_size and token.content.strip() and token_id not in stops:
                self._markers[token.content] = token_id
                vocabulary[token_id] = _NOT_TEXT + token.content.encode() + _NOT_TEXT
        self._vocab_size = vocab_size
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo(
                vocabulary,
                xgrammar.VocabType.RAW,
                vocab_size=vocab_size,
                stop_token_ids=stops,
                add_prefix_space=info.add_prefix_space,
            ),
            max_threads=1,
            cache_enabled=False,
        )

    def compile(self, wanted: StructuredOutput) -> Grammar:
        format = lower_tokens(as_format(wanted), self._markers)
        try:
            tag = json.dumps({"type": "structural_tag", "format": _with_chains(format)})
            grammar = XGrammar(self._compiler.compile_structural_tag(tag))
        except RuntimeError as error:
            reason = _LOCATION.sub("", str(error)).strip()
            raise GrammarError(f"the {wanted.kind} cannot be compiled: {reason}") from error
        first = np.zeros((1, -(-self._vocab_size // 32)), dtype=np.int32)
        grammar.create_matcher().fill(first, 0)
        if not first.any():
            raise GrammarError(f"no text fulfils the {wanted.kind}")
        return grammar


class XGrammar:
    """A compiled grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled

    def create_matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._compiled)


class XGrammarMatcher:
    """A thin cover: xgrammar's own matcher takes back any number of tokens."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._matcher = _import().GrammarMatcher(compiled)

    @property
    def is_finished(self) -> bool:
        return bool(self._matcher.is_terminated())

    def fill(self, mask: TokenMask, row: int) -> None:
        self._matcher.fill_next_token_bitmask(mask, row)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)


def _with_chains(format: Any) -> Any:
    """The format with schemas that bound strings as grammars that are quick to follow."""
    if isinstance(format, list):
        return [_with_chains(item) for item in format]
    if not isinstance(format, dict):
        return format
    if format.get("type") != "json_schema":
        return {
            key: value if key == "json_schema" else _with_chains(value)
            for key, value in format.items()
        }
    schema = json.dumps(format["json_schema"])
    if '"maxLength"' not in schema or not format.keys() <= _SCHEMA_KEYS:
        return format
    grammar = _import().Grammar.from_json_schema(
        schema, max_whitespace_cnt=format.get("max_whitespace_cnt")
    )
    chained = chain_bounded_strings(str(grammar))
    return format if chained is None else {"type": "grammar", "grammar": chained}


def _import() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise GrammarError(
            f"structured output needs the xgrammar package ({error}); run: {INSTALL_HINT}"
        ) from error
    return xgrammar
