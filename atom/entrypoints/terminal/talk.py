"""A conversation with a model: messages, parameters, one answer at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from atom.entrypoints.terminal.settings import read_setting, spelled

if TYPE_CHECKING:
    from atom.entrypoints.llm import LLM

Message = dict[str, Any]
Settings = Mapping[str, Any]


class Piece(NamedTuple):
    """What came of an answer at once.

    Attributes:
        finish_reason: None before the end.
        per_forward: tokens for each forward of the model, so far; None without drafts.
    """

    text: str
    num_tokens: int
    finish_reason: str | None = None
    per_forward: float | None = None


class ChatModel(Protocol):
    """What answers.

    Attributes:
        name: for people.
    """

    name: str

    def stream(self, messages: Sequence[Message], settings: Settings) -> Iterator[Piece]:
        """Answer; closing the iterator ends the answer.

        Raises:
            ValueError: when the messages or settings cannot be answered.
            RuntimeError: when the engine or the server failed.
        """
        ...

    def default(self, name: str) -> str:
        """Of a setting that nobody set, for people."""
        ...


class LocalModel:
    """An engine in this process."""

    def __init__(self, llm: LLM) -> None:
        self.name = llm.engine.model_name
        self._llm = llm
        params = llm.get_default_sampling_params()
        self._params = msgspec.structs.replace(params, max_tokens=None)

    def stream(self, messages: Sequence[Message], settings: Settings) -> Iterator[Piece]:
        params = msgspec.structs.replace(self._params, **settings)
        for output in self._llm.stream(self._llm.render_chat(messages), params):
            completion, drafts = output.outputs[0], output.spec_decode
            per_forward = drafts.tokens_per_forward if drafts and drafts.num_drafts else None
            num_tokens = len(completion.token_ids)
            yield Piece(completion.text, num_tokens, completion.finish_reason, per_forward)

    def default(self, name: str) -> str:
        return spelled(getattr(self._params, name))


@dataclass
class Answer:
    """What an answer cost.

    Attributes:
        num_tokens: of the answer.
        first: seconds until its first token; None when none came.
        rest: seconds from then on.
        finish_reason: None when it was stopped.
        per_forward: tokens for each forward; None without speculation.
    """

    text: str = ""
    num_tokens: int = 0
    first: float | None = None
    rest: float = 0.0
    finish_reason: str | None = None
    per_forward: float | None = None

    def describe(self) -> str:
        """One line."""
        parts = [f"{self.num_tokens} tokens"]
        if self.num_tokens > 1 and self.rest:
            parts.append(f"{(self.num_tokens - 1) / self.rest:.1f} a second")
        if self.first is not None:
            parts.append(f"the first after {self.first:.2f} s")
        if self.per_forward is not None:
            parts.append(f"{self.per_forward:.2f} per forward")
        if self.finish_reason is None:
            parts.append("stopped")
        elif self.finish_reason == "length":
            parts.append("cut off at max_tokens or at the end of the context")
        return ", ".join(parts)


class Talk:
    """Attributes:
    messages: of the conversation so far, as OpenAI has them.
    settings: of the next answer; what is not there is the model's default.
    """

    def __init__(
        self, model: ChatModel, system: str | None = None, settings: Settings | None = None
    ) -> None:
        self._model = model
        self.settings = dict(settings or {})
        self.system = system
        self.messages: list[Message] = []

    def ask(self, text: str, show: Callable[[str], None]) -> Answer:
        """Answer a message; Ctrl-C stops the answer, of which the conversation keeps what came.

        Args:
            show: gets the text piece by piece.

        Raises:
            ValueError: when the conversation can no longer run; the message is taken back.
            RuntimeError: when the engine failed.
        """
        self.messages.append({"role": "user", "content": text})
        answer = Answer()
        try:
            self._stream(answer, show)
        except KeyboardInterrupt:
            answer.finish_reason = None
        except (ValueError, RuntimeError):
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer

    def take_back(self) -> str | None:
        """Drop the last answer and its message, which is returned; None when there is none."""
        if not self.messages:
            return None
        self.messages.pop()
        text: str = self.messages.pop()["content"]
        return text

    def reset(self) -> None:
        self.messages.clear()

    def set(self, name: str, value: str) -> None:
        """Change a setting, as `read_setting` reads it."""
        self.settings[name] = read_setting(name, value)

    def value(self, name: str) -> str:
        """Of a setting, for people."""
        if name in self.settings:
            return spelled(self.settings[name])
        return self._model.default(name)

    def _stream(self, answer: Answer, show: Callable[[str], None]) -> None:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        started = first = time.perf_counter()
        for piece in self._model.stream([*system, *self.messages], self.settings):
            now = time.perf_counter()
            if answer.first is None and (piece.num_tokens or piece.text):
                first, answer.first = now, now - started
            answer.num_tokens += piece.num_tokens
            answer.rest = now - first
            answer.text += piece.text
            answer.per_forward = piece.per_forward
            answer.finish_reason = piece.finish_reason
            show(piece.text)
