"""How models mark reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from atom.entrypoints.parsing.text_stream import Steps, TextStream
from atom.entrypoints.parsing.tool_parsers.gpt_oss import MARKERS, final
from atom.entrypoints.parsing.tool_parsers.kimi_k3 import in_response
from atom.structured_output.params import StructuredOutput
from atom.structured_output.tags import as_format


@dataclass(frozen=True)
class ThinkTags:
    """Reasoning between two tags; the first may stand in the prompt.

    Source: the chat templates of DeepSeek R1, Kimi K2.5, Qwen 3, GLM 4.5, Step 3, MiniMax and
    Granite 3.3.

    Attributes:
        open: begins reasoning.
        close: ends it; so does a tool call.
        others: further tags, which say nothing.
        is_implied: answers begin within reasoning unless the prompt has closed it.
        special_tokens: those of which markers consist, where markers are more than a token.
    """

    open: str
    close: str
    others: tuple[str, ...] = ()
    is_implied: bool = False
    special_tokens: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close, *self.others)

    def is_open_after(self, prompt: str, continued: str = "") -> bool:
        """Whether what follows a prompt is reasoning.

        Args:
            prompt: as the chat template rendered it.
            continued: the prompt's end, when that is the begin of the answer.
        """
        last_open, last_close = continued.rfind(self.open), continued.rfind(self.close)
        if last_open != last_close:
            return last_open > last_close
        head = prompt.rstrip().removesuffix(continued.rstrip()).rstrip()
        if self.is_implied and not continued:
            return not head.endswith(self.close)
        return head.endswith(self.open)

    def end_after(self, prompt: str, continued: str = "") -> str | None:
        """The tag that ends the reasoning that a prompt opened; None when it opened none."""
        return self.close if self.is_open_after(prompt, continued) else None

    def own_tags_after(self, prompt: str) -> tuple[str, str] | None:
        """The tags between which an answer may begin by reasoning of its own accord; None after a
        prompt that has closed the reasoning, or when only a prompt opens it.
        """
        is_closed = self.is_implied or prompt.rstrip().endswith(self.close)
        return None if is_closed else (self.open, self.close)

    def in_channel(self, wanted: StructuredOutput) -> StructuredOutput:
        """What constrains the whole answer where `wanted` constrains its content."""
        return wanted


@dataclass(frozen=True)
class ThinkSections(ThinkTags):
    """Reasoning in a section beside that of the answer (Kimi K3); the prompt opens one of them."""

    def own_tags_after(self, prompt: str) -> None:
        del prompt

    def in_channel(self, wanted: StructuredOutput) -> StructuredOutput:
        return StructuredOutput.structural_tag(in_response(as_format(wanted)))


@dataclass(frozen=True)
class Phrases:
    """Reasoning that a phrase begins, at the start of an answer, and another one ends.

    The phrases are plain text elsewhere. Source: Granite 3.2's chat template.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    markers: tuple[str, ...] = ()
    special_tokens: tuple[str, ...] = ()

    def end_after(self, prompt: str, continued: str = "") -> None:
        del prompt, continued

    def own_tags_after(self, prompt: str) -> None:
        del prompt

    def in_channel(self, wanted: StructuredOutput) -> StructuredOutput:
        return wanted

    def begins(self, text: TextStream) -> Steps[bool]:
        """Pass over the phrase where the answer begins with it."""
        for phrase in self.opens:
            if (yield from text.accept_whole(phrase)):
                return True
        return False


@dataclass(frozen=True)
class Channels:
    """Reasoning in a channel of its own: the reader of tool calls knows them all (gpt-oss)."""

    markers: tuple[str, ...] = MARKERS
    special_tokens: tuple[str, ...] = ()

    def end_after(self, prompt: str, continued: str = "") -> None:
        del prompt, continued

    def own_tags_after(self, prompt: str) -> None:
        del prompt

    def in_channel(self, wanted: StructuredOutput) -> StructuredOutput:
        return StructuredOutput.structural_tag(final(as_format(wanted)))


ReasoningFormat = ThinkTags | Phrases | Channels
