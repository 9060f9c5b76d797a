"""Which formats a model writes, as its chat template or else its architecture says."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS
from atom.entrypoints.server_options import ServerOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rule:
    """A template that holds all of `texts` is of a model that writes the format `name`."""

    name: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """`name` is None where nothing was found; `reason` completes a sentence of the log."""

    name: str | None
    reason: str


TOOL_RULES = tuple(
    Rule(name, texts) for name, format in TOOL_PARSERS.items() for texts in format.template_texts
)
TOOL_ARCHITECTURES = {
    model_type: name for name, format in TOOL_PARSERS.items() for model_type in format.model_types
}
# The first rule that holds decides: what is more particular comes before what it contains.
REASONING_RULES = (
    Rule("gpt_oss", ("<|channel|>", "analysis")),
    Rule("kimi_k3", ("<|open|>", "<|sep|>", "think")),
    Rule("granite", ("Here is my thought process:", "Here is my response:")),
    Rule("minimax_m2", ("<minimax:tool_call>", "</think>")),  # results are in <response> tags
    Rule("granite_tags", ("<think>", "</think>", "<response>")),
    Rule("minimax_m3", ("<mm:think>",)),
    Rule("mistral", ("[THINK]", "[/THINK]")),
    Rule("think_tags", ("</think>",)),
    Rule("think_tags", ("<think>",)),
)
REASONING_ARCHITECTURES = {
    "gpt_oss": "gpt_oss",
    "kimi_k3": "kimi_k3",
    "step3_text": "step3",
    "step3_vl": "step3",
}
# A template of this shape that knows no tools: the prompt tells of them in Hermes' words.
CHATML = "<|im_start|>"


def find_tool_parser(template: str | None, model_type: str) -> Found:
    template = template or ""
    if (found := _by_template(template, TOOL_RULES)) is not None:
        return found
    if model_type in TOOL_ARCHITECTURES:
        return Found(TOOL_ARCHITECTURES[model_type], f"the model is of type {model_type}")
    if CHATML in template and "tools" not in template:
        return Found("hermes", "the chat template is ChatML and leaves the format of calls open")
    return Found(None, "neither the chat template nor the model's type names a known format")


def find_reasoning_parser(template: str | None, model_type: str) -> Found:
    if model_type in REASONING_ARCHITECTURES:
        return Found(REASONING_ARCHITECTURES[model_type], f"the model is of type {model_type}")
    found = _by_template(template or "", REASONING_RULES)
    return found or Found(None, "the chat template holds no marker of a known format")


def with_found_parsers(
    options: ServerOptions, template: str | None, model_type: str
) -> ServerOptions:
    """The options with `auto` replaced by what was found; the log says what and why."""
    finders = {"tool_call_parser": find_tool_parser, "reasoning_parser": find_reasoning_parser}
    names = {}
    for field, find in finders.items():
        flag = "--" + field.replace("_", "-")
        names[field] = getattr(options, field)
        if names[field] == "auto":
            found = find(template, model_type)
            names[field] = found.name or "none"
            logger.info("%s %s: %s", flag, names[field], found.reason)
        else:
            logger.info("%s %s, as given", flag, names[field])
    return replace(options, **names)


def _by_template(template: str, rules: Sequence[Rule]) -> Found | None:
    for rule in rules:
        if all(text in template for text in rule.texts):
            return Found(rule.name, f"the chat template holds {' and '.join(rule.texts)}")
    return None
