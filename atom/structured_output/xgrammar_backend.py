"""The xgrammar implementation of `GrammarBackend`."""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from atom.structured_output.base import Grammar, GrammarError, TokenMask
from atom.structured_output.forced_texts import text_lengths
from atom.structured_output.params import StructuredOutput
from atom.structured_output.schema.patterns import text_rule
from atom.structured_output.schema_grammar import schema_format
from atom.structured_output.spelling import Spelling
from atom.structured_output.tags import as_format, lower_tokens
from atom.structured_output.vocabulary import Vocabulary
from atom.structured_output.xgrammar_import import import_xgrammar

if TYPE_CHECKING:
    import xgrammar

# Size of xgrammar's cache of compiled grammar parts. With it a new schema compiles in a tenth of
# the time, 10 instead of 100 ms with 49k tokens. A vocabulary of 128k tokens needs about this size
# for that; half of it saves only half the time.
PARTS_BYTES = 256 << 20
# Caches of grammars with markers, each for grammars that differ in schemas alone; xgrammar 0.2.8
# takes parts for the same which differ in the ids of their tokens.
MAX_MARKED_CACHES = 4

# What must follow is found by a call that nothing stops, in 0.3 us a byte.
MAX_FORCED_BYTES = 1 << 16

# No context has room for as long an answer: 2^24 characters, at 4 bytes each.
_MAX_SHORTEST_BYTES = 4 << 24

# What holds ids of tokens in a format.
_TOKENS = frozenset({"token", "tokens", "exclude_tokens", "trigger_tokens"})

_BAD_ALLOC = "std::bad_alloc"
_LOCATION = re.compile(r"^\[[\d:]+\] \S+: ")


class XGrammarBackend:
    """Compiles for one vocabulary. Markers are allowed only where the grammar names them.

    Args:
        spelling: of texts in its tokens, for drafts.

    Raises:
        GrammarError: when xgrammar is not installed.
    """

    def __init__(self, vocabulary: Vocabulary, spelling: Spelling | None = None) -> None:
        self.vocabulary = vocabulary
        self._spelling = spelling
        xgrammar = import_xgrammar()
        self._tokens = xgrammar.TokenizerInfo(
            vocabulary.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=vocabulary.stop_token_ids,
            add_prefix_space=vocabulary.add_prefix_space,
        )
        self._compiler = self._create_compiler(PARTS_BYTES)
        self._of_marked = lru_cache(MAX_MARKED_CACHES)(
            lambda _: self._create_compiler(PARTS_BYTES // 2)
        )

    def compile(self, wanted: StructuredOutput) -> Grammar:
        format = lower_tokens(as_format(wanted), self.vocabulary.markers)
        first = np.zeros((1, -(-len(self.vocabulary.tokens) // 32)), dtype=np.int32)
        try:
            tag = json.dumps({"type": "structural_tag", "format": _with_own_grammars(format)})
            compiled = self._compiler_of(format).compile_structural_tag(tag)
            lengths = text_lengths(str(compiled.grammar))
            _check_shortest(wanted.kind, lengths.shortest)
            is_short = lengths.forced <= MAX_FORCED_BYTES
            grammar = XGrammar(compiled, self._spelling if is_short else None)
            grammar.create_matcher().fill(first, 0)
        except (RuntimeError, UnicodeDecodeError) as error:
            if _BAD_ALLOC in str(error):
                raise MemoryError("no memory is left to compile the grammar") from error
            text = str(error)
            if isinstance(error, UnicodeDecodeError):  # the library's text is cut in a character
                text = error.object.decode(errors="replace")
            reason = _LOCATION.sub("", text).strip()
            raise GrammarError(f"the {wanted.kind} cannot be compiled: {reason}") from error
        if not first.any():
            raise GrammarError(f"no text fulfils the {wanted.kind}")
        return grammar

    def _create_compiler(self, cache_bytes: int) -> xgrammar.GrammarCompiler:
        return import_xgrammar().GrammarCompiler(
            self._tokens, max_threads=1, cache_limit_bytes=cache_bytes
        )

    def _compiler_of(self, format: Any) -> xgrammar.GrammarCompiler:
        frame = _without_schemas(format)
        return self._of_marked(json.dumps(frame)) if _has_tokens(frame) else self._compiler


class XGrammar:
    """A compiled grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, spelling: Spelling | None) -> None:
        self.spelling = spelling
        self._compiled = compiled

    @property
    def num_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def create_matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._compiled)


class XGrammarMatcher:
    """Wraps xgrammar's matcher, which can roll back any number of tokens."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._matcher = import_xgrammar().GrammarMatcher(compiled)

    @property
    def is_finished(self) -> bool:
        return bool(self._matcher.is_terminated())

    def fill(self, mask: TokenMask, row: int) -> None:
        self._matcher.fill_next_token_bitmask(mask, row)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def accept_text(self, text: bytes) -> bool:
        return bool(self._matcher.accept_string(text))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def forced_text(self) -> bytes:
        try:
            text: str = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError as error:  # it begins or ends within a character
            return bytes(error.object)
        return text.encode()


def _check_shortest(kind: str, num_bytes: float) -> None:
    """Refuse what could only end at a limit of tokens, after any number of them.

    Raises:
        GrammarError: saying why.
    """
    if math.isinf(num_bytes):
        raise GrammarError(
            f"no finite text fulfils the {kind}: a rule or schema in it always needs itself again"
        )
    if num_bytes > _MAX_SHORTEST_BYTES:
        raise GrammarError(
            f"every text that fulfils the {kind} has millions of characters; lower its counts"
        )


def _has_tokens(format: Any) -> bool:
    if isinstance(format, list):
        return any(map(_has_tokens, format))
    if not isinstance(format, dict):
        return False
    return not _TOKENS.isdisjoint(format) or any(map(_has_tokens, format.values()))


def _without_schemas(format: Any) -> Any:
    if isinstance(format, list):
        return [_without_schemas(item) for item in format]
    if not isinstance(format, dict):
        return format
    return {key: _without_schemas(v) for key, v in format.items() if key != "json_schema"}


def _with_own_grammars(format: Any) -> Any:
    """Replace schemas and patterns by grammars, as far as xgrammar would not obey them."""
    if isinstance(format, list):
        return [_with_own_grammars(item) for item in format]
    if not isinstance(format, dict):
        return format
    if format.get("type") == "json_schema":
        return schema_format(format)
    if format.get("type") == "regex":
        return {"type": "grammar", "grammar": f"root ::= {text_rule(format['pattern'])}\n"}
    return {key: _with_own_grammars(value) for key, value in format.items()}
