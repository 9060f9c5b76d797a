"""`context_management` of a message: which parts of its history the prompt leaves out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from atom.entrypoints.chat.protocol import ApiModel, kind_of
from atom.entrypoints.http.unknown_fields import UNSUPPORTED_CONTENT

CLEAR_THINKING = "clear_thinking_20251015"
CLEAR_TOOL_USES = "clear_tool_uses_20250919"

Count = Annotated[int, Field(ge=0)]


class AllThinking(ApiModel):
    type: Literal["all"]


class ThinkingTurns(ApiModel):
    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class InputTokens(ApiModel):
    type: Literal["input_tokens"]
    value: Count


class ToolUses(ApiModel):
    type: Literal["tool_uses"]
    value: Count


def _kind(value: Any) -> str:
    return "<string>" if isinstance(value, str) else kind_of("<untyped>")(value)


class ClearThinking(ApiModel):
    """Leave out the thinking of all turns but the last `keep` that have some."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[
        Annotated[Literal["all"], Tag("<string>")]
        | Annotated[AllThinking, Tag("<all>")]
        | Annotated[ThinkingTurns, Tag("<thinking_turns>")],
        Discriminator(_kind),
    ] = ThinkingTurns(type="thinking_turns", value=1)

    @property
    def least_tokens(self) -> int:
        """How many tokens must go for the edit to be made."""
        return 0

    def applied(self, num_turns: int, num_tokens: int) -> dict[str, Any]:
        """What the answer says of it."""
        said = {"cleared_thinking_turns": num_turns, "cleared_input_tokens": num_tokens}
        return {"type": self.type, **said}


class ClearToolUses(ApiModel):
    """Leave out the results of all tool uses but the last `keep`, once `trigger` is exceeded.

    Attributes:
        clear_at_least: unless so many tokens would go, nothing is left out.
        exclude_tools: names of tools whose uses stay.
        clear_tool_inputs: whether the inputs go too; those of the named tools, if it is a list.
    """

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[
        Annotated[InputTokens, Tag("<input_tokens>")] | Annotated[ToolUses, Tag("<tool_uses>")],
        Discriminator(_kind),
    ] = InputTokens(type="input_tokens", value=100_000)
    keep: ToolUses = ToolUses(type="tool_uses", value=3)
    clear_at_least: InputTokens | None = None
    exclude_tools: Annotated[list[str], Field(fail_fast=True)] | None = None
    clear_tool_inputs: bool | Annotated[list[str], Field(fail_fast=True)] | None = None

    @property
    def least_tokens(self) -> int:
        """How many tokens must go for the edit to be made."""
        return 0 if self.clear_at_least is None else self.clear_at_least.value

    def applied(self, num_uses: int, num_tokens: int) -> dict[str, Any]:
        """What the answer says of it."""
        said = {"cleared_tool_uses": num_uses, "cleared_input_tokens": num_tokens}
        return {"type": self.type, **said}

    def clears_input(self, tool: str) -> bool:
        if isinstance(self.clear_tool_inputs, list):
            return tool in self.clear_tool_inputs
        return bool(self.clear_tool_inputs)


Edit = Annotated[
    Annotated[ClearThinking, Tag(f"<{CLEAR_THINKING}>")]
    | Annotated[ClearToolUses, Tag(f"<{CLEAR_TOOL_USES}>")],
    Discriminator(
        kind_of("<untyped>"),
        custom_error_type=UNSUPPORTED_CONTENT,
        custom_error_message=f"only edits of type {CLEAR_THINKING} and {CLEAR_TOOL_USES} are "
        "supported",
    ),
]


class ContextManagement(ApiModel):
    edits: Annotated[list[Edit], Field(fail_fast=True)] | None = None
