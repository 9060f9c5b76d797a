"""`/v1/responses` (OpenAI's Responses API) as a chat: the request's translation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from atom.entrypoints.chat.protocol import ChatCompletionRequest, SamplingFields
from atom.entrypoints.chat.translation import translate_request
from atom.entrypoints.http.errors import bad_request
from atom.entrypoints.http.provider_tools import own_tools
from atom.entrypoints.http.unknown_fields import UnknownFields
from atom.entrypoints.openai.responses.protocol import (
    AllowedTools,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    InputImage,
    InputItem,
    InputMessage,
    InputText,
    ReasoningItem,
    ResponsesRequest,
    ToolChoice,
    ToolReference,
)
from atom.quoting import excerpt

LOGPROBS = "message.output_text.logprobs"

# The names in this API of chat's fields.
FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


def as_chat(body: ResponsesRequest, unknown: UnknownFields) -> ChatCompletionRequest:
    """The chat that the request stands for.

    Args:
        unknown: takes the unknown fields of objects that chat checks.

    Raises:
        ApiError: 400 for what no chat can do.
    """
    names = set(SamplingFields.model_fields)
    fields = body.model_dump(include=names, exclude_none=True, by_alias=True)
    optional = {
        "max_completion_tokens": body.max_output_tokens,
        "stream": body.stream,
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "response_format": _response_format(body),
        **_tools(body),
        **_logprobs(body),
    }
    fields |= {name: value for name, value in optional.items() if value is not None}
    fields["messages"] = _messages(body)
    return translate_request(ChatCompletionRequest, fields, FIELD_NAMES, unknown)


def response_fields(
    body: ResponsesRequest, model: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """What a response says besides its status, output and usage: the request and defaults."""
    effort = None if body.reasoning is None else body.reasoning.effort
    text_format = body.text.format if body.text is not None else None
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": _said(body.temperature, defaults.get("temperature", 1.0)),
        "text": {"format": text_format or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": _echoed_choice(body.tool_choice),
        "tools": [_echoed(tool) for tool in own_tools(body.tools)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _said(body.top_p, defaults.get("top_p", 1.0)),
        "truncation": "disabled",
        "user": body.user,
    }


def _said(value: float | None, default: float) -> float:
    return default if value is None else value


def _echoed(tool: FunctionTool) -> dict[str, Any]:
    names = ("type", "name", "description", "parameters", "strict")
    return tool.model_dump(include=set(names))


def _echoed_choice(choice: ToolChoice | None) -> str | dict[str, Any]:
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else choice.model_dump()


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    """Chat has the fields of a schema one level deeper."""
    given = body.text.format if body.text is not None else None
    if given is None or given.get("type") != "json_schema":
        return given
    schema = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _logprobs(body: ResponsesRequest) -> dict[str, Any]:
    if LOGPROBS in (body.include or ()):
        return {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.top_logprobs:
        raise bad_request(f'top_logprobs needs include=["{LOGPROBS}"]', "top_logprobs")
    return {}


def _tools(body: ResponsesRequest) -> dict[str, Any]:
    tools = own_tools(body.tools)
    choice: str | dict[str, Any] | None
    if isinstance(body.tool_choice, AllowedTools):
        tools = _allowed(tools, body.tool_choice.tools)
        choice = body.tool_choice.mode
    elif isinstance(body.tool_choice, ToolReference):
        choice = {"type": "function", "function": {"name": body.tool_choice.name}}
    else:
        choice = body.tool_choice
    if not tools:
        # "auto" among no tools is what happens anyway.
        return {"tool_choice": None if choice == "auto" else choice}
    return {"tools": [_tool(tool) for tool in tools], "tool_choice": choice}


def _allowed(tools: list[FunctionTool], references: list[ToolReference]) -> list[FunctionTool]:
    wanted = {reference.name for reference in references}
    missing = sorted(wanted - {tool.name for tool in tools})
    if missing:
        raise bad_request(
            f"tool_choice allows unknown tools: {excerpt(', '.join(missing))}", "tool_choice"
        )
    return [tool for tool in tools if tool.name in wanted]


def _tool(tool: FunctionTool) -> dict[str, Any]:
    names = {"name", "description", "parameters", "strict"}
    return {"type": "function", "function": tool.model_dump(include=names, exclude_none=True)}


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Messages of the items; the reasoning, text and calls of one turn become one message."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    turn: list[dict[str, Any]] = []
    known: set[str] = set()
    for item in body.input:
        if isinstance(item, ReasoningItem) and not item.content:
            continue
        message = _message(item)
        if not (turn and _continues(turn[-1]["role"], known, message)):
            messages += _joined(turn)
            turn, known = [], set()
        turn.append(message)
        known |= message.keys()
    return messages + _joined(turn)


def _message(item: InputItem) -> dict[str, Any]:
    if isinstance(item, InputMessage):
        is_text = isinstance(item.content, str) or all(
            isinstance(part, InputText) for part in item.content
        )
        if item.role == "assistant" and not is_text:
            raise bad_request("input: an assistant message holds no input_image", "input")
        return {"role": item.role, "content": _content(item.content)}
    if isinstance(item, FunctionCallOutput):
        output = {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
        return output if item.name is None else {**output, "name": item.name}
    if isinstance(item, FunctionCall):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    assert isinstance(item, ReasoningItem)
    text = "".join(part.text for part in item.content or ())
    return {"role": "assistant", "reasoning_content": text}


def _continues(role: str, known: set[str], message: dict[str, Any]) -> bool:
    """Whether a message is of the turn before it: reasoning, then text, then calls and what
    comes with them.

    Args:
        known: the fields of the turn so far.
    """
    if role != "assistant" or message["role"] != "assistant":
        return False
    return "tool_calls" in known or "tool_calls" in message or "content" not in known


def _joined(turn: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of one turn as one; in time that is linear in what they hold."""
    if not turn or turn[0]["role"] != "assistant":
        return turn
    joined: dict[str, Any] = {"role": "assistant"}
    for name in ("content", "reasoning_content"):
        if texts := [message[name] for message in turn if name in message]:
            joined[name] = "".join(texts)
    if calls := [call for message in turn for call in message.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    joined.setdefault("content", None if calls else "")
    return [joined]


def _content(content: str | Sequence[InputText | InputImage]) -> str | list[dict[str, Any]]:
    """A chat message's content; texts have nothing between them."""
    if isinstance(content, str):
        return content
    if not any(isinstance(part, InputImage) for part in content):
        return "".join(part.text for part in content if isinstance(part, InputText))
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, InputText)
        else {"type": "image_url", "image_url": part.image_url}
        for part in content
    ]
