"""Formats of tool calls by the name that `--tool-call-parser` takes."""

from __future__ import annotations

from atom.entrypoints.parsing.tool_parsers.base import ToolFormat
from atom.entrypoints.parsing.tool_parsers.deepseek_v3 import DeepseekV3
from atom.entrypoints.parsing.tool_parsers.deepseek_v31 import DeepseekV31
from atom.entrypoints.parsing.tool_parsers.glm45 import Glm45
from atom.entrypoints.parsing.tool_parsers.glm47 import Glm47
from atom.entrypoints.parsing.tool_parsers.gpt_oss import GptOss
from atom.entrypoints.parsing.tool_parsers.hermes import Hermes
from atom.entrypoints.parsing.tool_parsers.kimi_k2 import KimiK2
from atom.entrypoints.parsing.tool_parsers.kimi_k3 import KimiK3
from atom.entrypoints.parsing.tool_parsers.llama3_json import Llama3Json
from atom.entrypoints.parsing.tool_parsers.minimax_m2 import MiniMaxM2
from atom.entrypoints.parsing.tool_parsers.mistral import Mistral, MistralNamed
from atom.entrypoints.parsing.tool_parsers.pythonic import Pythonic
from atom.entrypoints.parsing.tool_parsers.qwen3_coder import Qwen3Coder

TOOL_PARSERS: dict[str, type[ToolFormat]] = {
    "deepseek_v3": DeepseekV3,
    "deepseek_v31": DeepseekV31,
    "glm45": Glm45,
    "glm47": Glm47,
    "gpt_oss": GptOss,
    "hermes": Hermes,
    "kimi_k2": KimiK2,
    "kimi_k3": KimiK3,
    "llama3_json": Llama3Json,
    "minimax_m2": MiniMaxM2,
    "mistral": Mistral,
    "mistral_named": MistralNamed,
    "pythonic": Pythonic,
    "qwen3_coder": Qwen3Coder,
}

# What forced calls are written in where a model's own format is not known.
GENERIC = "llama3_json"
