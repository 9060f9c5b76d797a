"""Grammar libraries behind one interface: ours as the engine uses it, and two without our code."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from atom.entrypoints.parsing.tool_grammar import tool_call_grammar
from atom.structured_output.base import TokenMask
from atom.structured_output.params import StructuredOutput
from atom.structured_output.vocabulary import Vocabulary
from atom.structured_output.xgrammar_backend import XGrammarBackend

# What the two need that this project does not declare.
INSTALL_HINTS = {
    "llguidance": "pip install --no-deps llguidance",
    "xgrammar": "pip install --no-deps xgrammar && pip install apache-tvm-ffi pydantic",
}


class Steps(Protocol):
    """The position of one text."""

    def fill(self, mask: TokenMask, row: int) -> None: ...

    def accept(self, token_id: int) -> bool: ...

    def rollback(self, count: int) -> None: ...

    def forced_text(self) -> bytes: ...


class Arm(Protocol):
    """One way to enforce schemas."""

    def compile(self, schema: Any) -> Callable[[], Steps]:
        """What begins a text. Raises ValueError for a schema that is refused."""

    def compile_tools(self, tools: Sequence[Mapping[str, Any]]) -> Callable[[], Steps]:
        """What begins a call of one of the tools, given in OpenAI's shape."""


def create_arm(name: str, vocabulary: Vocabulary, tokenizer: PreTrainedTokenizerBase) -> Arm:
    if name == "atom":
        return _Atom(vocabulary)
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(f"error: {name} is not installed; run: {INSTALL_HINTS[name]}") from error
    if name == "xgrammar":
        return _XGrammar(library, vocabulary)
    return _LLGuidance(vocabulary, tokenizer)


class _Atom:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self.backend = XGrammarBackend(vocabulary)
        self.backend.compile(StructuredOutput.json_object())

    def compile(self, schema: Any) -> Callable[[], Steps]:
        return self.backend.compile(StructuredOutput.json_schema(schema)).create_matcher

    def compile_tools(self, tools: Sequence[Mapping[str, Any]]) -> Callable[[], Steps]:
        wanted = tool_call_grammar("hermes", tools, "required", parallel_tool_calls=False)
        assert wanted is not None
        return self.backend.compile(wanted).create_matcher


class _XGrammar:
    def __init__(self, library: Any, vocabulary: Vocabulary) -> None:
        self._library = library
        tokens = library.TokenizerInfo(
            vocabulary.tokens,
            library.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=vocabulary.stop_token_ids,
        )
        self._compiler = library.GrammarCompiler(tokens, max_threads=1)
        self._compiler.compile_json_schema({"type": "object"}, strict_mode=False)

    def compile(self, schema: Any) -> Callable[[], Steps]:
        try:
            text = json.dumps(schema)
            compiled = self._compiler.compile_json_schema(text, strict_mode=False)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return lambda: _XGrammarSteps(self._library.GrammarMatcher(compiled))

    def compile_tools(self, tools: Sequence[Mapping[str, Any]]) -> Callable[[], Steps]:
        calls = []
        for head, schema in _heads(tools):
            arguments = {"type": "json_schema", "json_schema": schema}
            parts = [_text(head), arguments, _text(CALL_END)]
            calls.append({"type": "sequence", "elements": parts})
        format = {"type": "or", "elements": calls}
        tag = json.dumps({"type": "structural_tag", "format": format})
        compiled = self._compiler.compile_structural_tag(tag)
        return lambda: _XGrammarSteps(self._library.GrammarMatcher(compiled))


CALL_END = "}\n</tool_call>"


def _heads(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What a call says before its arguments, in the format of Hermes, and their schema."""
    for tool in tools:
        function = tool["function"]
        name = json.dumps(function["name"])
        yield f'<tool_call>\n{{"name": {name}, "arguments": ', function["parameters"]


def _text(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


class _XGrammarSteps:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, mask: TokenMask, row: int) -> None:
        self._matcher.fill_next_token_bitmask(mask, row)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def forced_text(self) -> bytes:
        text: str = self._matcher.find_jump_forward_string()
        return text.encode()


class _Tokens(msgspec.Struct):
    """What llguidance asks a tokenizer for."""

    eos_token_id: int
    tokens: list[bytes]
    special_token_ids: list[int]
    encode: Callable[[str], list[int]]
    bos_token_id: int | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        return self.encode(text if isinstance(text, str) else text.decode())


class _LLGuidance:
    def __init__(self, vocabulary: Vocabulary, tokenizer: PreTrainedTokenizerBase) -> None:
        self._library = importlib.import_module("llguidance")
        special = sorted({*vocabulary.markers.values(), *vocabulary.stop_token_ids})
        tokens = list(vocabulary.tokens)
        for index in special:
            tokens[index] = b"\xff" + tokens[index].strip(b"\xff")
        encode = partial(tokenizer.encode, add_special_tokens=False)
        described = _Tokens(vocabulary.stop_token_ids[0], tokens, special, encode)
        self._tokenizer = self._library.LLTokenizer(
            self._library.TokenizerWrapper(described),
            n_vocab=len(tokens),
            eos_token=vocabulary.stop_token_ids,
        )

    def compile(self, schema: Any) -> Callable[[], Steps]:
        library = self._library.LLMatcher
        grammar = library.grammar_from_json_schema(json.dumps(schema))
        matcher = library(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: _LLGuidanceSteps(matcher.deep_copy())

    def compile_tools(self, tools: Sequence[Mapping[str, Any]]) -> Callable[[], Steps]:
        library = self._library.LLMatcher
        lines = ["start: " + " | ".join(f"call{i}" for i in range(len(tools)))]
        for i, (head, schema) in enumerate(_heads(tools)):
            lines.append(f"call{i}: {json.dumps(head)} arguments{i} {json.dumps(CALL_END)}")
            lines.append(f"arguments{i}: %json {json.dumps(schema)}")
        grammar = library.grammar_from_lark("\n".join(lines))
        matcher = library(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: _LLGuidanceSteps(matcher.deep_copy())


class _LLGuidanceSteps:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, mask: TokenMask, row: int) -> None:
        target: np.ndarray[Any, Any] = mask[row]
        self._matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token_id]) == 1)

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def forced_text(self) -> bytes:
        return bytes(self._matcher.compute_ff_bytes())
