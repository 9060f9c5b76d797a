"""Reasoning between two tags; the first may stand in the prompt.

Source: the chat templates of Kimi K2.5, DeepSeek R1 and Qwen 3, which agree.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """Attributes:
    open: begins reasoning.
    close: ends it; so does a tool call.
    """

    open: str
    close: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close)

    def is_open_after(self, prompt: str, continued: str = "") -> bool:
        """Whether what follows a prompt is reasoning.

        Args:
            prompt: as the chat template rendered it.
            continued: the prompt's end, when that is the begin of the answer.
        """
        last_open, last_close = continued.rfind(self.open), continued.rfind(self.close)
        if last_open != last_close:
            return last_open > last_close
        head = prompt.rstrip().removesuffix(continued.rstrip())
        return head.rstrip().endswith(self.open)


THINK_TAGS = ReasoningFormat("<think>", "</think>")
