"""Formats of reasoning by the name that `--reasoning-parser` takes."""

from __future__ import annotations

from atom.entrypoints.parsing.reasoning.formats import (
    Channels,
    Phrases,
    ReasoningFormat,
    ThinkSections,
    ThinkTags,
)
from atom.entrypoints.parsing.tool_parsers import kimi_k3

THINK_TAGS = ThinkTags("<think>", "</think>")

REASONING_PARSERS: dict[str, ReasoningFormat] = {
    "deepseek_r1": THINK_TAGS,
    "glm45": THINK_TAGS,
    "gpt_oss": Channels(),
    "granite": Phrases(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "granite_tags": ThinkTags("<think>", "</think>", ("<response>", "</response>")),
    "kimi_k2": THINK_TAGS,
    "kimi_k3": ThinkSections(
        *kimi_k3.THINK,
        (*kimi_k3.RESPONSE, kimi_k3.MESSAGE_END, kimi_k3.END),
        special_tokens=kimi_k3.KimiK3.special_tokens,
    ),
    "minimax_m2": THINK_TAGS,
    "minimax_m3": ThinkTags("<mm:think>", "</mm:think>"),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "qwen3": THINK_TAGS,
    "step3": ThinkTags("<think>", "</think>", is_implied=True),
    "think_tags": THINK_TAGS,
}
