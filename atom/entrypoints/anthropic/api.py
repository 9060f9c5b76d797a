"""`/v1/messages` (Anthropic's Messages API) as a chat: the request's translation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from atom.entrypoints.anthropic.protocol import (
    Block,
    CountTokensRequest,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
)
from atom.entrypoints.chat.protocol import ChatCompletionRequest, SamplingFields
from atom.entrypoints.chat.tokenization import THINKING_VARIABLES
from atom.entrypoints.chat.translation import translate_request
from atom.entrypoints.http.errors import ApiError, bad_request
from atom.entrypoints.http.provider_tools import own_tools
from atom.entrypoints.http.unknown_fields import UnknownFields

# The names in this API of chat's fields.
FIELD_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: CountTokensRequest, unknown: UnknownFields) -> ChatCompletionRequest:
    """The chat that the request stands for.

    Args:
        unknown: takes the unknown fields of objects that chat checks.

    Raises:
        ApiError: 400 for what no chat can do.
    """
    if body.thread is not None:
        raise _no_threads()
    if not body.messages:
        raise bad_request("messages must hold at least one message", "messages")
    optional: dict[str, Any] = {
        **_tools(body),
        **_output(body),
        "chat_template_kwargs": _template_kwargs(body),
    }
    if isinstance(body, MessagesRequest):
        optional |= body.model_dump(include=set(SamplingFields.model_fields), by_alias=True)
        optional |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
        }
    if body.messages[-1].role == "assistant":  # the answer goes on where it ends
        optional["continue_final_message"] = True
    fields = {name: value for name, value in optional.items() if value is not None}
    fields["messages"] = _messages(body)
    return translate_request(ChatCompletionRequest, fields, FIELD_NAMES, unknown)


def _no_threads() -> ApiError:
    return ApiError(
        400,
        "thread is not supported: this server keeps no messages; send all of them without it",
        param="thread",
        code="unsupported_field",
        details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
    )


def _template_kwargs(body: CountTokensRequest) -> dict[str, Any] | None:
    if body.thinking is None:
        return body.chat_template_kwargs
    if body.thinking.type == "enabled" and body.thinking.budget_tokens is None:
        raise bad_request("thinking.budget_tokens is missing", "thinking.budget_tokens")
    thinks = body.thinking.type != "disabled"
    return {**dict.fromkeys(THINKING_VARIABLES, thinks), **(body.chat_template_kwargs or {})}


def _output(body: CountTokensRequest) -> dict[str, Any]:
    config = body.output_config
    if config is None:
        return {}
    if config.format is None:
        return {"reasoning_effort": config.effort}
    schema = {"name": "output", "schema": config.format.schema_, "strict": True}
    response_format = {"type": "json_schema", "json_schema": schema}
    return {"reasoning_effort": config.effort, "response_format": response_format}


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    choice = body.tool_choice
    tools = own_tools(body.tools)
    if not tools:
        if choice is None or choice.type in ("auto", "none"):
            return {}
        raise bad_request(f"tool_choice {choice.type!r} needs tools", "tool_choice")
    spelled: dict[str, Any] = {"tools": [_tool(tool) for tool in tools]}
    if choice is not None:
        spelled["tool_choice"] = _tool_choice(choice)
        if choice.disable_parallel_tool_use:
            spelled["parallel_tool_calls"] = False
    return spelled


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if (choice.name is None) == (choice.type == "tool"):
        raise bad_request("tool_choice has a name when, and only when, its type is 'tool'")
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return TOOL_CHOICES[choice.type]


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, where))
        else:
            messages += _turn(message, message.content, where)
    return messages


def _assistant(blocks: list[Block], where: str) -> dict[str, Any]:
    """One message of a turn's blocks: chat knows no order between text and calls."""
    text: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            text.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thinking.append(block.thinking)
        elif isinstance(block, (ToolResultBlock, ImageBlock)):
            raise bad_request(f"{where}: an assistant message holds no {block.type}", where)
        else:
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _turn(message: InputMessage, blocks: list[Block], where: str) -> list[dict[str, Any]]:
    """A user's or system's blocks: each tool result is a message of its own."""
    messages: list[dict[str, Any]] = []
    told: list[TextBlock | ImageBlock] = []

    def end_text() -> None:
        if told:
            messages.append({"role": message.role, "content": _content(told)})
            told.clear()

    for block in blocks:
        if isinstance(block, TextBlock) or (
            isinstance(block, ImageBlock) and message.role == "user"
        ):
            told.append(block)
        elif isinstance(block, ToolResultBlock) and message.role == "user":
            end_text()
            messages.append(_tool_result(block))
        else:
            raise bad_request(f"{where}: a {message.role} message holds no {block.type}", where)
    end_text()
    return messages or [{"role": message.role, "content": ""}]


def _tool_result(block: ToolResultBlock) -> dict[str, Any]:
    """Chat has no mark for failure, so the text says it."""
    given = block.content or ""
    blocks = [TextBlock(type="text", text=given)] if isinstance(given, str) else [*given]
    if block.is_error:
        blocks.insert(0, TextBlock(type="text", text="Error: "))
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(blocks)}


def _content(blocks: Sequence[TextBlock | ImageBlock]) -> str | list[dict[str, Any]]:
    """A chat message's content; texts have nothing between them."""
    if all(isinstance(block, TextBlock) for block in blocks):
        return _text([block for block in blocks if isinstance(block, TextBlock)])
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, TextBlock)
        else {"type": "image_url", "image_url": block.source.as_url}
        for block in blocks
    ]


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
