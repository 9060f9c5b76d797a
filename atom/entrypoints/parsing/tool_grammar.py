"""Grammars of tool calls: what a model may write so that its calls can be read.

Markers are written as such: a grammar names the vocabulary's token where there is one, and then
nothing else can spell a marker. So a call's JSON is only ever invalid when it was cut.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from atom.entrypoints.parsing.calls.call_grammar import CallGrammar, tagged
from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS
from atom.quoting import excerpt, quote
from atom.structured_output.params import StructuredOutput
from atom.structured_output.schema.json_schema import lower_schema, relax_schema
from atom.structured_output.tags import (
    ANY_OBJECT,
    Format,
    after,
    as_format,
    json_document,
    literal,
    one_of,
    sequence,
)

logger = logging.getLogger(__name__)

Tool = Mapping[str, Any]

# White space in a row in arguments: a model that is made to write them may not know how to go on.
MAX_WHITESPACE = 2
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_call_grammar(
    parser_name: str,
    tools: Sequence[Tool],
    tool_choice: str | Mapping[str, Any],
    parallel_tool_calls: bool = True,
    starts_after: str | None = None,
    opens_with: str | None = None,
    strictness: str = "off",
) -> StructuredOutput | None:
    """The grammar that a request's tools and their choice ask for.

    Args:
        parser_name: the format of the calls, as in `TOOL_PARSERS`.
        tools: in OpenAI's shape. With `strict` their arguments obey the schema in every mode;
            without it in the modes that force a call, if the schema can be enforced.
        tool_choice: `none`, `auto`, `required`, `named` (of the one tool given), or OpenAI's
            object that names a function. A named function is called exactly once.
        starts_after: the marker that ends the reasoning in which the answer begins.
        opens_with: the marker with which an answer may begin such reasoning itself.
        strictness: what is enforced of calls in `auto`, once one has begun, beside tools with
            `strict`: nothing (`off`), the names of the tools (`names`), or their schemas, too
            (`schemas`).

    Returns:
        None when the model is free: for `none`, and for `auto` with parallel calls, strictness
        `off` and no strict tool.

    Raises:
        ValueError: for a format without a grammar, a tool that is not there, or a strict schema
            that cannot be enforced.
    """
    return _tool_call_grammar(
        parser_name,
        json.dumps(tools),
        json.dumps(tool_choice),
        parallel_tool_calls,
        starts_after,
        opens_with,
        strictness,
    )


# Agents send the same tools with every turn.
@lru_cache(maxsize=64)
def _tool_call_grammar(
    parser_name: str,
    tools_text: str,
    choice: str,
    parallel_tool_calls: bool,
    starts_after: str | None,
    opens_with: str | None,
    strictness: str,
) -> StructuredOutput | None:
    tools, tool_choice = json.loads(tools_text), json.loads(choice)
    if tool_choice == "none" or not tools:
        return None
    if isinstance(tool_choice, Mapping):
        name = tool_choice["function"]["name"]
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise ValueError(f"tool_choice names {quote(name)}, which is not among the tools")
        tool_choice = "named"
    is_strict = strictness != "off" or any(tool["function"].get("strict") for tool in tools)
    if tool_choice == "auto" and parallel_tool_calls and not is_strict:
        return None
    if parser_name not in TOOL_PARSERS:
        raise ValueError(
            f"the tool format {parser_name!r} has no grammar; there are "
            f"{', '.join(sorted(TOOL_PARSERS))}"
        )
    grammar = TOOL_PARSERS[parser_name].grammar
    with_schemas = tool_choice != "auto" or strictness == "schemas"
    calls = [_call(grammar, i, tool, with_schemas) for i, tool in enumerate(tools)]
    count = grammar.max_calls if parallel_tool_calls and tool_choice != "named" else 1
    if tool_choice == "auto":
        opening = TOOL_PARSERS[parser_name].opening
        format = _optional_calls(grammar, calls, count, opening)
        is_free = format["type"] == "token_triggered_tags"  # reasoning is free text too
        return _tagged(parser_name, format, None if is_free else starts_after, opens_with)
    return _tagged(parser_name, _calls(grammar, calls, count), starts_after, opens_with)


def answer_or_calls(
    answer: StructuredOutput,
    parser_name: str,
    tools: Sequence[Tool],
    parallel_tool_calls: bool = True,
    starts_after: str | None = None,
    opens_with: str | None = None,
) -> StructuredOutput:
    """Either a text under `answer`, or calls: `auto` beside a response format.

    Raises:
        ValueError: as `tool_call_grammar`.
    """
    calls = tool_call_grammar(parser_name, tools, "required", parallel_tool_calls)
    assert calls is not None
    either = one_of([as_format(answer), as_format(calls)])
    return _tagged(parser_name, either, starts_after, opens_with)


def _tagged(
    parser_name: str, format: Format, starts_after: str | None, opens_with: str | None
) -> StructuredOutput:
    """The format, behind reasoning in which nothing opens as a call."""
    if starts_after is not None:
        opening = sorted(TOOL_PARSERS[parser_name].opening)
        format = after(starts_after, format, opening, opens_with)
    return StructuredOutput.structural_tag(format)


def _call(grammar: CallGrammar, index: int, tool: Tool, with_schema: bool) -> Format:
    function = tool["function"]
    schema = function.get("parameters")
    name = function["name"]
    if function.get("strict"):
        schema = _NO_PARAMETERS if schema is None else schema or ANY_OBJECT
        try:
            arguments = _arguments(lower_schema(schema), grammar.forbidden)
        except ValueError as error:
            raise ValueError(f"tools[{index}].function.parameters: {error}") from error
    elif with_schema and schema:
        arguments = {**_arguments(_relaxed(name, schema), grammar.forbidden), "lenient": name}
    else:
        arguments = _arguments(ANY_OBJECT, grammar.forbidden)
    return grammar.call(name, arguments)


def _relaxed(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What can be enforced of a schema, and the log says what cannot."""
    key = json.dumps(schema)
    relaxed, dropped = _relax(key)
    if dropped:
        logger.info(
            "not enforced of the schema of the tool %s: %s",
            quote(name),
            excerpt("; ".join(dropped)),
        )
    return relaxed


@lru_cache(maxsize=1024)
def _relax(text: str) -> tuple[Mapping[str, Any], list[str]]:
    relaxed, dropped = relax_schema(json.loads(text))
    if not isinstance(relaxed, Mapping) or not _may_be_object(relaxed):
        return ANY_OBJECT, [*dropped, "#: arguments are an object"]
    return relaxed, dropped


def _may_be_object(schema: Mapping[str, Any]) -> bool:
    return schema.get("type", "object") == "object" and "enum" not in schema


def _arguments(schema: Mapping[str, Any], forbidden: Sequence[str]) -> Format:
    document = json_document(schema, MAX_WHITESPACE)
    # With exclusions xgrammar does not count the length of strings, nor are patterns ours.
    if not forbidden or _mentions(schema, {"minLength", "maxLength", "pattern"}):
        return document
    return {**document, "excludes": list(forbidden)}


def _mentions(schema: Mapping[str, Any], names: set[str]) -> bool:
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            if names & part.keys():
                return True
            pending += part.values()
        elif isinstance(part, list):
            pending += part
    return False


def _calls(grammar: CallGrammar, calls: list[Format], count: int) -> Format:
    """One call, or up to `count` of them, in their section."""
    call = one_of(calls)
    several = call
    if count > 1:
        more = sequence(literal(grammar.separator), call) if grammar.separator else call
        several = sequence(call, {"type": "repeat", "min": 0, "max": count - 1, "content": more})
    around = [part for part in (grammar.head, several, grammar.tail) if part is not None]
    several = sequence(*around) if len(around) > 1 else several
    if grammar.section is None:
        return several
    return tagged(grammar.section[0], several, grammar.section[1])


def _optional_calls(
    grammar: CallGrammar, calls: list[Format], count: int, opening: frozenset[str]
) -> Format:
    """Free text, in which whatever opens as a call is one."""
    if grammar.section is not None:
        trigger, tags = grammar.section[0], [_calls(grammar, calls, count)]
    elif all(call["type"] == "tag" for call in calls):
        trigger = calls[0]["begin"]["token"]
        contents = one_of([call["content"] for call in calls])
        tags = [tagged(trigger, contents, calls[0]["end"]["token"])]
    else:
        assert grammar.text is not None
        return one_of([_calls(grammar, calls, count), grammar.text])
    return {
        "type": "token_triggered_tags",
        "trigger_tokens": [trigger],
        "tags": tags,
        "exclude_tokens": sorted(opening - {trigger}),
        "stop_after_first": count == 1,
    }
