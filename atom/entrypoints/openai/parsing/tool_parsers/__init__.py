"""Formats of tool calls by the name that `--tool-call-parser` takes."""

from __future__ import annotations

from atom.entrypoints.openai.parsing.tool_parsers.base import ToolFormat
from atom.entrypoints.openai.parsing.tool_parsers.deepseek_v3 import DeepseekV3
from atom.entrypoints.openai.parsing.tool_parsers.hermes import Hermes
from atom.entrypoints.openai.parsing.tool_parsers.kimi_k2 import KimiK2
from atom.entrypoints.openai.parsing.tool_parsers.llama3_json import Llama3Json

TOOL_PARSERS: dict[str, type[ToolFormat]] = {
    "deepseek_v3": DeepseekV3,
    "hermes": Hermes,
    "kimi_k2": KimiK2,
    "llama3_json": Llama3Json,
}
