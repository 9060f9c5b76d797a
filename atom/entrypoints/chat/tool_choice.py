"""What a request wants of tools, and whether this server can do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from atom.entrypoints.chat.protocol import ChatCompletionRequest, NamedToolChoice
from atom.entrypoints.chat.tokenization import tool_dicts
from atom.entrypoints.http.errors import bad_request
from atom.entrypoints.parsing.tool_parsers import GENERIC
from atom.entrypoints.server_options import ServerOptions
from atom.quoting import excerpt, quote


@dataclass(frozen=True)
class ToolUse:
    """Attributes:
    mode: `none` also when there are no tools; `named` is `required` with the one tool that
        the request names.
    tools: those that may be called, in OpenAI's shape; empty when the mode is `none`.
    parallel: several calls may be made at once.
    parser: the name of the format of calls, None when the mode is `none`.
    """

    mode: Literal["none", "auto", "required", "named"]
    tools: tuple[dict[str, Any], ...] = ()
    parallel: bool = True
    parser: str | None = None


NO_TOOLS = ToolUse("none")


def resolve_tool_use(body: ChatCompletionRequest, options: ServerOptions) -> ToolUse:
    """Raises:
    ApiError: 400 for a choice among no tools, of an unknown tool, or that the server's
        options do not allow.
    """
    tools = tuple(tool_dicts(body) or ())
    choice = body.tool_choice
    if not tools:
        if choice in (None, "none", "auto"):
            return NO_TOOLS
        raise bad_request("tool_choice needs tools", "tool_choice")
    if choice == "none":
        return NO_TOOLS
    mode: Literal["auto", "required", "named"] = "required" if choice == "required" else "auto"
    if isinstance(choice, NamedToolChoice):
        mode, tools = "named", _named(tools, choice.function.name)
    if mode == "auto" and (options.tool_format is None or not options.enable_auto_tool_choice):
        missing = "--tool-call-parser NAME" if options.tool_format is None else ""
        flag = missing or "--enable-auto-tool-choice"
        raise bad_request(
            f"tool_choice 'auto' needs a server started with {flag}; send 'required', 'none' or a "
            "function's name",
            "tool_choice",
        )
    parser = options.tool_format or GENERIC
    return ToolUse(mode, tools, body.parallel_tool_calls is not False, parser)


def _named(tools: tuple[dict[str, Any], ...], name: str) -> tuple[dict[str, Any], ...]:
    for tool in tools:
        if tool["function"]["name"] == name:
            return (tool,)
    names = ", ".join(tool["function"]["name"] for tool in tools)
    raise bad_request(
        f"tool_choice names {quote(name)}; the tools are {excerpt(names)}", "tool_choice"
    )
