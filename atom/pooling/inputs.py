"""Texts, and pairs of texts, as the tokens that a model reads."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atom.messages import ContextLengthError, RequestRefusedError, check_text
from atom.pooling.recipe import TextOptions
from atom.quoting import quote
from atom.text.control_tokens import ControlTokens

# Source: the model card of Qwen3-Reranker.
_QWEN3_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_QWEN3_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class PoolingInput:
    """What is computed for one vector or score.

    Attributes:
        token_type_ids: which text of a pair each token is of; None where the model has none.
    """

    token_ids: Sequence[int]
    token_type_ids: Sequence[int] | None = None


class InputLengthError(ContextLengthError):
    """An input has more tokens than the model takes."""

    def __init__(self, name: str, num_tokens: int, limit: int) -> None:
        RequestRefusedError.__init__(
            self,
            f"This model's maximum context length is {limit} tokens, and {name} has {num_tokens}; "
            f"shorten it, or let truncate_prompt_tokens cut it",
            name.partition("[")[0],
        )
        self.num_prompt_tokens = num_tokens
        self.max_model_len = limit
        self.max_tokens = None


@dataclass(frozen=True)
class InputLimits:
    """Attributes:
    max_model_len: tokens of an input, special ones included.
    vocab_size: rows of the token table.
    """

    max_model_len: int
    vocab_size: int

    def cut_to(self, wanted: int | None) -> int | None:
        """The length that an input is cut to; None if it is not.

        Args:
            wanted: -1 is the most that the model takes.

        Raises:
            RequestRefusedError: for a length that cannot be.
        """
        if wanted is None:
            return None
        if wanted == -1:
            return self.max_model_len
        if not 1 <= wanted <= self.max_model_len:
            raise RequestRefusedError(
                f"truncate_prompt_tokens must be -1 or from 1 to {self.max_model_len}, got "
                f"{quote(wanted)}",
                "truncate_prompt_tokens",
            )
        return wanted

    def check(self, tokens: Sequence[int], name: str, cut_to: int | None = None) -> None:
        """Raises:
        RequestRefusedError: for tokens that the model does not take, or that were not cut to
            `cut_to`, which leaves no room for special tokens.
        """
        param = name.partition("[")[0]
        if not tokens:
            raise RequestRefusedError(f"{name} holds no tokens", param)
        if len(tokens) > self.max_model_len:
            raise InputLengthError(name, len(tokens), self.max_model_len)
        if cut_to is not None and len(tokens) > cut_to:
            raise RequestRefusedError(
                f"truncate_prompt_tokens={cut_to} leaves no room for a text beside special tokens",
                "truncate_prompt_tokens",
            )
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestRefusedError(
                f"{name}: token id {quote(wrong)} is outside the vocabulary of {self.vocab_size}",
                param,
            )


class LockedTokenizer:
    """transformers' tokenizer, for several threads: the length that it cuts to is a state of it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def __call__(self, *texts: str, **how: Any) -> Any:
        with self._lock:
            return self._tokenizer(*texts, **how)


class TextEncoder:
    """Tokenises texts as sentence-transformers does, by any thread."""

    def __init__(
        self, tokenizer: LockedTokenizer, options: TextOptions, limits: InputLimits
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._limits = limits

    def encode(
        self,
        content: str | Sequence[int],
        name: str,
        *,
        prompt_name: str | None = None,
        truncate: int | None = None,
        add_special_tokens: bool = True,
    ) -> PoolingInput:
        """A text, with the prompt before it, or tokens as they are.

        Args:
            name: of the field in errors, such as `input[2]`.
            prompt_name: of a prompt of the checkpoint; its default one when None.
            truncate: tokens to cut to, -1 for as many as the model takes.

        Raises:
            RequestRefusedError: for what the model cannot take.
        """
        length = self._limits.cut_to(truncate)
        prompt = self._prompt(prompt_name)
        if isinstance(content, str):
            check_content(content, name)
            text = prompt + content
            if self._options.do_lower_case:
                text = text.lower()
            tokens = self._tokenizer(
                text,
                add_special_tokens=add_special_tokens,
                truncation=length is not None,
                max_length=length,
                verbose=False,
            )["input_ids"]
        else:
            tokens = list(content)[:length]
        self._limits.check(tokens, name, length)
        return PoolingInput(tokens)

    def tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        """Those of a text alone, of any number."""
        found: list[int] = self._tokenizer(
            text, add_special_tokens=add_special_tokens, verbose=False
        )["input_ids"]
        return found

    def cut(self, text: str, num_tokens: int) -> str:
        """The beginning of a text that has so many tokens, special ones apart."""
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        offsets = encoded["offset_mapping"]
        return text if len(offsets) <= num_tokens else text[: offsets[num_tokens - 1][1]]

    def _prompt(self, name: str | None) -> str:
        prompts: Mapping[str, str] = self._options.prompts
        if name is None:
            default = self._options.default_prompt_name
            return prompts[default] if default is not None else ""
        if name not in prompts:
            known = ", ".join(prompts) or "none"
            raise RequestRefusedError(
                f"prompt_name {quote(name)} is none of the model's, which are: {known}",
                "prompt_name",
            )
        return prompts[name]


def check_content(text: str, name: str) -> None:
    """Raises RequestRefusedError for an empty text, and for half a surrogate pair."""
    if not text:
        raise RequestRefusedError(f"{name} is empty", name.partition("[")[0])
    check_text(text, name)


class PairEncoder(ABC):
    """Writes a query and a document as a model that scores wants them.

    Attributes:
        takes_instruction: whether the task may be described.
    """

    takes_instruction: bool

    @abstractmethod
    def encode(
        self, query: str, document: str, instruction: str | None, length: int | None
    ) -> PoolingInput:
        """Args:
        length: tokens to cut to; None to keep all.
        """


class TwoTexts(PairEncoder):
    """The tokenizer's own way, with separators and, in BERT, two types of tokens."""

    takes_instruction = False

    def __init__(self, tokenizer: LockedTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(
        self, query: str, document: str, instruction: str | None, length: int | None
    ) -> PoolingInput:
        encoded = self._tokenizer(
            query, document, truncation=length is not None, max_length=length, verbose=False
        )
        return PoolingInput(encoded["input_ids"], encoded.get("token_type_ids"))


class Qwen3Template(PairEncoder):
    """Qwen3-Reranker's chat, in which special tokens that texts spell stay text.

    Args:
        tokenizer: transformers'; nothing may have it cut texts.
        instruction: of requests without one; the model card's when None.
    """

    takes_instruction = True

    def __init__(self, tokenizer: Any, instruction: str | None = None) -> None:
        self._instruction = instruction or QWEN3_INSTRUCTION
        self._texts = ControlTokens(tokenizer)
        self._prefix, self._suffix = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (_QWEN3_PREFIX, _QWEN3_SUFFIX)
        )

    def encode(
        self, query: str, document: str, instruction: str | None, length: int | None
    ) -> PoolingInput:
        text = (
            f"<Instruct>: {instruction or self._instruction}\n<Query>: {query}\n"
            f"<Document>: {document}"
        )
        marked = self._texts.mark(text)
        _, tokens = self._texts.encode(marked, add_special_tokens=False)
        if length is not None:
            tokens = tokens[: max(length - len(self._prefix) - len(self._suffix), 1)]
        return PoolingInput([*self._prefix, *tokens, *self._suffix])
