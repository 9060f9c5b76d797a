"""The edits of `context_management`, made on the messages of the request itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from atom.entrypoints.anthropic.context_management import (
    ClearThinking,
    ClearToolUses,
    ThinkingTurns,
)
from atom.entrypoints.anthropic.protocol import (
    Block,
    CountTokensRequest,
    InputMessage,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from atom.entrypoints.http.errors import ContextExceededError

Body = TypeVar("Body", bound=CountTokensRequest)
Messages = list[InputMessage]

# What the model reads in place of a result.
CLEARED_RESULT = "[This tool result was cleared to save context.]"


@dataclass(frozen=True)
class ManagedContext(Generic[Body]):
    """A request after its edits.

    Attributes:
        applied: what the answer says of the edits that cleared something; None without
            `context_management`.
    """

    body: Body
    applied: list[dict[str, Any]] | None


def manage_context(
    body: Body, count_tokens: Callable[[CountTokensRequest], int]
) -> ManagedContext[Body]:
    """Make the edits that the request asks for, in its order.

    Args:
        count_tokens: of a request's prompt; asked only when there is something to clear.
    """
    if body.context_management is None:
        return ManagedContext(body, None)
    applied = []
    num_tokens: int | None = None
    for edit in body.context_management.edits or ():
        if isinstance(edit, ClearThinking):
            messages, cleared = _clear_thinking(body.messages, edit)
        else:
            messages, cleared = _clear_tool_uses(body.messages, edit)
        if not cleared:
            continue
        if num_tokens is None:
            num_tokens = prompt_size(body, count_tokens)
        if isinstance(edit, ClearToolUses) and not _is_due(edit, body.messages, num_tokens):
            continue
        edited = body.model_copy(update={"messages": messages})
        after = prompt_size(edited, count_tokens)
        if num_tokens - after < edit.least_tokens:
            continue
        applied.append(edit.applied(cleared, max(0, num_tokens - after)))
        body, num_tokens = edited, after
    return ManagedContext(body, applied)


def prompt_size(body: CountTokensRequest, count_tokens: Callable[[CountTokensRequest], int]) -> int:
    """The tokens of a prompt; a lower bound of one that is too long to be tokenised."""
    try:
        return count_tokens(body)
    except ContextExceededError as error:
        return error.num_prompt_tokens


def _is_due(edit: ClearToolUses, messages: Messages, num_tokens: int) -> bool:
    if edit.trigger.type == "input_tokens":
        return num_tokens > edit.trigger.value
    return sum(1 for _ in _tool_uses(messages)) > edit.trigger.value


def _clear_thinking(messages: Messages, edit: ClearThinking) -> tuple[Messages, int]:
    """The messages without the thinking of earlier turns, and the number of these turns."""
    if not isinstance(edit.keep, ThinkingTurns):
        return messages, 0
    turns = [turn for turn in _turns(messages) if any(_thinks(messages[i]) for i in turn)]
    cleared = turns[: -edit.keep.value]
    places = {index for turn in cleared for index in turn}

    def is_kept(block: Block) -> bool:
        return not isinstance(block, ThinkingBlock)

    edited = [
        message.model_copy(update={"content": list(filter(is_kept, message.content))})
        if index in places and not isinstance(message.content, str)
        else message
        for index, message in enumerate(messages)
    ]
    return edited, len(cleared)


def _clear_tool_uses(messages: Messages, edit: ClearToolUses) -> tuple[Messages, int]:
    """The messages without the results of earlier tool uses, and the number of these."""
    answered = {
        block.tool_use_id
        for message in messages
        for block in _blocks(message)
        if isinstance(block, ToolResultBlock)
    }
    excluded = set(edit.exclude_tools or ())
    uses = [use for use in _tool_uses(messages) if use.id in answered and use.name not in excluded]
    cleared = {use.id for use in uses[: max(0, len(uses) - edit.keep.value)]}

    def edited(block: Block) -> Block:
        if isinstance(block, ToolResultBlock) and block.tool_use_id in cleared:
            return block.model_copy(update={"content": CLEARED_RESULT})
        if (
            isinstance(block, ToolUseBlock)
            and block.id in cleared
            and edit.clears_input(block.name)
        ):
            return block.model_copy(update={"input": {}})
        return block

    return [
        message
        if isinstance(message.content, str)
        else message.model_copy(update={"content": [edited(block) for block in message.content]})
        for message in messages
    ], len(cleared)


def _turns(messages: Messages) -> Iterator[list[int]]:
    """The places of each turn's assistant messages: results of tools do not end a turn."""
    turn: list[int] = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            turn.append(index)
        elif message.role == "user" and turn and not _has_results(message):
            yield turn
            turn = []
    if turn:
        yield turn


def _tool_uses(messages: Messages) -> Iterator[ToolUseBlock]:
    for message in messages:
        for block in _blocks(message):
            if isinstance(block, ToolUseBlock):
                yield block


def _blocks(message: InputMessage) -> list[Block]:
    return [] if isinstance(message.content, str) else message.content


def _thinks(message: InputMessage) -> bool:
    return any(isinstance(block, ThinkingBlock) for block in _blocks(message))


def _has_results(message: InputMessage) -> bool:
    return any(isinstance(block, ToolResultBlock) for block in _blocks(message))
