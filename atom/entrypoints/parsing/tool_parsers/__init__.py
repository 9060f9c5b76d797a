"""Formats of tool calls by the name that `--tool-call-parser` takes."""

from __future__ import annotations

from atom.entrypoints.parsing.calls.base import ToolFormat
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

# In the order in which templates are searched for what each writes: the more particular first.
TOOL_PARSERS: dict[str, type[ToolFormat]] = {
    "kimi_k2": KimiK2,
    "kimi_k3": KimiK3,
    "deepseek_v3": DeepseekV3,
    "deepseek_v31": DeepseekV31,
    "gpt_oss": GptOss,
    "mistral_named": MistralNamed,
    "mistral": Mistral,
    "qwen3_coder": Qwen3Coder,
    "minimax_m2": MiniMaxM2,
    "glm47": Glm47,
    "glm45": Glm45,
    "pythonic": Pythonic,
    "hermes": Hermes,
    "llama3_json": Llama3Json,
}

# What forced calls are written in where a model's own format is not known.
GENERIC = "llama3_json"
