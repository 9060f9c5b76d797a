"""`/v1/chat/completions`: messages through the template, and what comes back as choices."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from atom.entrypoints.chat.constraint import constraint_names
from atom.entrypoints.chat.format import ChatFormat
from atom.entrypoints.chat.generation import Generation, deadline_of
from atom.entrypoints.chat.params import check_stream_fields, sampling_params, usage_chunks
from atom.entrypoints.chat.prompt import Prompt
from atom.entrypoints.chat.protocol import ChatCompletionRequest, NamedToolChoice, text_of
from atom.entrypoints.chat.tokenization import PromptEncoder, tool_dicts
from atom.entrypoints.http.errors import MAX_MESSAGE, bad_request
from atom.entrypoints.parsing.output_parser import ChatOutputParser
from atom.entrypoints.parsing.reasoning import REASONING_PARSERS
from atom.entrypoints.parsing.tool_grammar import answer_or_calls, tool_call_grammar
from atom.entrypoints.parsing.tool_parsers import GENERIC, TOOL_PARSERS
from atom.entrypoints.server_options import ServerOptions
from atom.quoting import excerpt, quote
from atom.sampling_params import SamplingParams
from atom.text.detokenizer import Vocabulary
from atom.text.prepared_params import PreparedParams

# What a request wants of tools, and whether this server can do it.


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


class _Reasoning(NamedTuple):
    """The marker that ends the reasoning before an answer, and the one with which the model may
    begin it; the latter is None where the prompt has, both where there is none.
    """

    end: str | None
    opening: str | None


def prepare_chat(
    body: ChatCompletionRequest,
    model: str,
    encoder: PromptEncoder,
    vocabulary: Vocabulary,
    options: ServerOptions,
    defaults: Mapping[str, Any],
) -> tuple[Generation, ChatFormat]:
    """Render, tokenise and validate; returns what to ask of the engine and how to answer.

    Args:
        defaults: the model's sampling parameters.

    Raises:
        ApiError: 400 for what cannot be generated as asked.
    """
    check_stream_fields(body)
    field_names = {"prompt": "messages", "logprobs": "top_logprobs", **constraint_names(body)}
    if body.max_completion_tokens is not None:
        field_names["max_tokens"] = "max_completion_tokens"
    use = resolve_tool_use(body, options)
    params = _params(body, field_names, use, options, defaults)
    prompt = encoder.encode_chat(
        body, add_special_tokens=bool(body.add_special_tokens), with_tools=use.mode != "none"
    )
    reasoning_end = _reasoning_end(body, prompt, options)
    reasoning = _reasoning(body, prompt, reasoning_end, options)
    if use.parser is not None:
        field_names.setdefault("structured_output", "tools")
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"

    def create_parser(index: int) -> ChatOutputParser:
        return ChatOutputParser(
            use.parser,
            options.reasoning_format,
            use.tools,
            reasoning_end is not None,
            id_salt=f"{answer_id}/{index}",
            ends_at_repeat=use.mode == "required",
        )

    constrained = _constrained(params, use, reasoning, options)
    generation = Generation(
        id=answer_id,
        model=model,
        created=int(time.time()),
        prompts=[prompt],
        params=PreparedParams(
            constrained,
            (lambda: create_parser(0).closes_after) if use.mode == "required" else None,
        ),
        priority=body.priority or 0,
        deadline=deadline_of(body.timeout),
        cache_salt=body.cache_salt or "",
        stream=bool(body.stream),
        usage=usage_chunks(body),
        field_names=field_names,
    )

    return generation, ChatFormat(body, vocabulary, create_parser)


def _params(
    body: ChatCompletionRequest,
    field_names: dict[str, str],
    use: ToolUse,
    options: ServerOptions,
    defaults: Mapping[str, Any],
) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    limits = [n for n in (body.max_completion_tokens, body.max_tokens) if n is not None]
    return sampling_params(
        body,
        field_names,
        defaults,
        max_tokens=min(limits, default=None),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        kept_special_tokens=_markers(use.parser, options.reasoning_format) or None,
    )


def _markers(tool_parser: str | None, reasoning_parser: str | None) -> list[str]:
    """The parsers see these even where they are special tokens, and no other special token."""
    markers: list[str] = []
    if tool_parser is not None:
        format = TOOL_PARSERS[tool_parser]
        markers += (*format.markers, *format.special_tokens)
    if reasoning_parser is not None:
        reasoning = REASONING_PARSERS[reasoning_parser]
        markers += (*reasoning.markers, *reasoning.special_tokens)
    return markers


def _constrained(
    params: SamplingParams, use: ToolUse, reasoning: _Reasoning, options: ServerOptions
) -> SamplingParams:
    """The parameters with the grammar of the answer, which may be calls instead of content.

    Args:
        reasoning: what may stand before it.
    """
    wanted = params.structured_output
    if wanted is not None and options.reasoning_format is not None:
        wanted = REASONING_PARSERS[options.reasoning_format].in_channel(wanted)
    if use.parser is None:
        if wanted is not None:
            wanted = msgspec.structs.replace(
                wanted, starts_after=reasoning.end, opens_with=reasoning.opening
            )
    else:
        call = (use.parser, use.tools)
        try:
            if use.mode == "auto" and wanted is not None:
                wanted = answer_or_calls(
                    wanted, *call, use.parallel, reasoning.end, reasoning.opening
                )
            else:
                # A forced call has no content that could obey a response format.
                wanted = tool_call_grammar(
                    *call,
                    use.mode,
                    use.parallel,
                    reasoning.end,
                    reasoning.opening,
                    options.tool_strictness,
                )
        except ValueError as error:
            raise bad_request(excerpt(str(error), MAX_MESSAGE), "tools") from error
        if wanted is not None and len(wanted.value) > options.max_tool_grammar:
            raise bad_request(
                f"the grammar of the tools has {len(wanted.value)} characters, and this server "
                f"takes {options.max_tool_grammar}; send fewer tools, or start it with a larger "
                "--max-tool-grammar",
                "tools",
            )
    if wanted is not None and params.ignore_eos:
        raise bad_request("ignore_eos cannot be combined with constrained calls", "ignore_eos")
    return msgspec.structs.replace(params, structured_output=wanted)


def _reasoning_end(
    body: ChatCompletionRequest, prompt: Prompt, options: ServerOptions
) -> str | None:
    """The marker that ends the reasoning that the prompt opened; None when it opened none."""
    if options.reasoning_format is None or prompt.text is None:
        return None
    continued = ""
    if body.continues:
        continued = text_of(body.messages[-1].content)
    return REASONING_PARSERS[options.reasoning_format].end_after(prompt.text, continued)


def _reasoning(
    body: ChatCompletionRequest, prompt: Prompt, end: str | None, options: ServerOptions
) -> _Reasoning:
    if end is not None or options.reasoning_format is None or prompt.text is None or body.continues:
        return _Reasoning(end, None)
    tags = REASONING_PARSERS[options.reasoning_format].own_tags_after(prompt.text)
    return _Reasoning(None, None) if tags is None else _Reasoning(tags[1], tags[0])
