"""Tools that a provider runs on its own machines; here they are left out of the prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

Tool = TypeVar("Tool", bound=BaseModel)

# A date or another version may follow, as in `web_search_20250305`.
PROVIDER_TOOLS = re.compile(
    r"(advisor|apply_patch|bash|builtin_function|code_execution|code_interpreter|computer|"
    r"computer_use|custom|file_search|image_generation|local_shell|mcp|mcp_toolset|memory|"
    r"namespace|programmatic_tool_calling|shell|text_editor|tool_search|tool_search_tool|"
    r"web_fetch|web_search)(_preview|_bm25|_regex)?(_\d[\d_]*)?"
)

PROVIDER_TAG = "<provider>"


class ProviderTool(BaseModel):
    """A tool of one of the types above, whatever else it says."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str


def tool_kind(own: str) -> Callable[[Any], str]:
    """Tells `ProviderTool`, whose tag is `PROVIDER_TAG`, from the tools of the client.

    Args:
        own: the type of the client's tools; their tag is "<own>", also where it is missing.
    """

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        is_provided = isinstance(kind, str) and kind != own and PROVIDER_TOOLS.fullmatch(kind)
        return PROVIDER_TAG if is_provided else f"<{own}>"

    return tag


def own_tools(tools: Iterable[Tool | ProviderTool] | None) -> list[Tool]:
    """The tools that are the client's, which the model may call."""
    return [tool for tool in tools or () if not isinstance(tool, ProviderTool)]
