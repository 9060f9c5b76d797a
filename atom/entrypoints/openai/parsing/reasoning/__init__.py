"""Formats of reasoning by the name that `--reasoning-parser` takes."""

from __future__ import annotations

from atom.entrypoints.openai.parsing.reasoning.think_tags import THINK_TAGS, ReasoningFormat

REASONING_PARSERS: dict[str, ReasoningFormat] = {
    "deepseek_r1": THINK_TAGS,
    "kimi_k2": THINK_TAGS,
    "qwen3": THINK_TAGS,
    "think_tags": THINK_TAGS,
}
