"""Prompts for synthesis: conversations from JSONL files, and user turns written by the target."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Conversation = list[dict[str, str]]

_ROLES = ("system", "user", "assistant", "tool")
# A placeholder for the user turn; must not occur in chat templates.
_SENTINEL = "atom user turn"


class DataError(ValueError):
    """Unusable training data; the message names the file and the line."""


@dataclass(frozen=True)
class PromptFile:
    """A JSONL file of prompts, `PATH` or `PATH:FIELD` on the command line.

    Attributes:
        field: the field with a user message as text; None if each line has OpenAI `messages`.
    """

    path: Path
    field: str | None = None

    @classmethod
    def parse(cls, text: str) -> PromptFile:
        path, colon, field = text.rpartition(":")
        return cls(Path(path), field) if colon and field.isidentifier() else cls(Path(text))

    def read(self) -> list[Conversation]:
        """All conversations; each ends with a user turn.

        Raises:
            DataError: for an unusable file or line.
        """
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {self.path}: {error}") from error
        conversations = [
            self._conversation(line, number) for number, line in enumerate(lines, 1) if line.strip()
        ]
        if not conversations:
            raise DataError(f"{self.path} is empty: it needs one JSON object a line")
        return conversations

    def _conversation(self, line: str, number: int) -> Conversation:
        where = f"{self.path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}")
        if self.field is not None:
            text = record.get(self.field)
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{where}: field {self.field!r} holds no text")
            return [{"role": "user", "content": text}]
        return _open_turns(record.get("messages"), where)


def _open_turns(messages: Any, where: str) -> Conversation:
    """The messages up to the last user turn; its answer, if any, is dropped."""
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: no list of 'messages'; name the field that holds the prompt as PATH:FIELD"
        )
    for message in messages:
        well_formed = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not well_formed or message.get("role") not in _ROLES:
            raise DataError(f"{where}: a message needs a role of {_ROLES} and a text 'content'")
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise DataError(f"{where}: no user message to answer")
    return [{"role": m["role"], "content": m["content"]} for m in messages[: users[-1] + 1]]


@dataclass(frozen=True)
class Prompt:
    """One prompt to answer.

    Attributes:
        index: its number; seeds its sampling.
        conversation: None lets the target write the user turn.
    """

    index: int
    conversation: Conversation | None


def plan_prompts(
    files: Sequence[PromptFile], num_self_synthesized: int, seed: int, samples_per_prompt: int = 1
) -> list[Prompt]:
    """All prompts of a synthesis, shuffled; deterministic.

    Raises:
        DataError: for unusable files, or when there are no prompts.
    """
    conversations: list[Conversation | None] = [None] * num_self_synthesized
    for file in files:
        conversations += file.read() * samples_per_prompt
    if not conversations:
        raise DataError("nothing to answer: give --prompts FILE or --self-synthesized N")
    random.Random(seed).shuffle(conversations)
    return [Prompt(index, conversation) for index, conversation in enumerate(conversations)]


@dataclass(frozen=True)
class ChatTemplate:
    """The target's chat template, as token ids.

    Attributes:
        user_prefix: the tokens before the text of a first user turn.
    """

    tokenizer: PreTrainedTokenizerBase
    user_prefix: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
        """Raises:
        DataError: when the tokenizer has no usable chat template.
        """
        if not tokenizer.chat_template:
            raise DataError("the target's tokenizer has no chat template; give --chat-template")
        turn = [{"role": "user", "content": _SENTINEL}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        start = text.find(_SENTINEL)
        if start < 0:
            raise DataError("the chat template leaves out the user's turn")
        return cls(tokenizer, tokenizer.encode(text[:start], add_special_tokens=False))

    def render(self, conversation: Conversation) -> list[int]:
        """The token ids of a conversation, up to the beginning of the answer."""
        text = self.tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text.strip()
