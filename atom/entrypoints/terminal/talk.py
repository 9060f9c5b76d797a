"""A conversation with a model in this process: messages, parameters, one answer at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from atom.sampling_params import SamplingParams

if TYPE_CHECKING:
    from atom.entrypoints.llm import LLM
    from atom.stats import SpecDecodeStats

# What `/set` changes.
SETTINGS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@dataclass
class Answer:
    """What an answer cost.

    Attributes:
        num_tokens: of the answer.
        first: seconds until its first token; None when none came.
        rest: seconds from then on.
        finish_reason: None when it was stopped.
        drafts: those that were verified; None without speculation.
    """

    text: str = ""
    num_tokens: int = 0
    first: float | None = None
    rest: float = 0.0
    finish_reason: str | None = None
    drafts: SpecDecodeStats | None = None

    def describe(self) -> str:
        """One line."""
        parts = [f"{self.num_tokens} tokens"]
        if self.num_tokens > 1 and self.rest:
            parts.append(f"{(self.num_tokens - 1) / self.rest:.1f} a second")
        if self.first is not None:
            parts.append(f"the first after {self.first:.2f} s")
        if self.drafts is not None and self.drafts.num_drafts:
            parts.append(f"{self.drafts.tokens_per_forward:.2f} per forward")
        if self.finish_reason is None:
            parts.append("stopped")
        elif self.finish_reason == "length":
            parts.append("cut off at max_tokens or at the end of the context")
        return ", ".join(parts)


def changed(params: SamplingParams, name: str, value: str) -> SamplingParams:
    """Parameters with one of `SETTINGS` changed; `none` for one that may be left out.

    Raises:
        ValueError: for an unknown name, or a value that it cannot have.
    """
    if name not in SETTINGS:
        raise ValueError(f"unknown setting {name!r}; there are {', '.join(SETTINGS)}")
    kind = next(f.type for f in msgspec.structs.fields(SamplingParams) if f.name == name)
    text = value.strip().lower()
    try:
        typed = None if text == "none" else json.loads(text)
        return msgspec.structs.replace(params, **{name: msgspec.convert(typed, kind)})
    except (json.JSONDecodeError, msgspec.ValidationError):
        raise ValueError(f"{name} cannot be {value!r}") from None


class Talk:
    """Attributes:
    messages: of the conversation so far, as OpenAI has them.
    params: of the next answer.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self.params = params
        self.system = system
        self.messages: list[dict[str, Any]] = []

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
        """Change a parameter, as `changed` does."""
        self.params = changed(self.params, name, value)

    def _stream(self, answer: Answer, show: Callable[[str], None]) -> None:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = self._llm.render_chat([*system, *self.messages])
        started = time.perf_counter()
        first = started
        for output in self._llm.stream(prompt, self.params):
            completion = output.outputs[0]
            now = time.perf_counter()
            if completion.token_ids and answer.first is None:
                first, answer.first = now, now - started
            answer.num_tokens += len(completion.token_ids)
            answer.rest = now - first
            answer.text += completion.text
            answer.drafts = output.spec_decode
            answer.finish_reason = completion.finish_reason
            show(completion.text)
