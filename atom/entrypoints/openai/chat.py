"""`/v1/chat/completions`: messages through the template, and what comes back as choices."""

from __future__ import annotations

import time
import uuid

import msgspec

from atom.entrypoints.detokenizer import Vocabulary
from atom.entrypoints.openai.chat_format import ChatFormat
from atom.entrypoints.openai.errors import bad_request
from atom.entrypoints.openai.generation import Generation
from atom.entrypoints.openai.options import ServerOptions
from atom.entrypoints.openai.output_parser import ChatOutputParser
from atom.entrypoints.openai.params import check_stream_fields, includes_usage, sampling_params
from atom.entrypoints.openai.protocol import ChatCompletionRequest
from atom.entrypoints.openai.reasoning import REASONING_PARSERS
from atom.entrypoints.openai.tokenization import Prompt, PromptEncoder
from atom.entrypoints.openai.tool_choice import ToolUse, resolve_tool_use
from atom.entrypoints.openai.tool_grammar import tool_call_grammar
from atom.entrypoints.openai.tool_parsers import TOOL_PARSERS
from atom.sampling_params import SamplingParams


async def prepare_chat(
    body: ChatCompletionRequest,
    model: str,
    encoder: PromptEncoder,
    vocabulary: Vocabulary,
    options: ServerOptions,
) -> tuple[Generation, ChatFormat]:
    """Render, tokenise and validate; returns what to ask of the engine and how to answer.

    Raises:
        ApiError: 400 for what cannot be generated as asked.
    """
    check_stream_fields(body)
    field_names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        field_names["max_tokens"] = "max_completion_tokens"
    use = resolve_tool_use(body, options)
    params = _params(body, field_names, use, options)
    prompt = await encoder.encode_chat(
        body, add_special_tokens=bool(body.add_special_tokens), with_tools=use.mode != "none"
    )
    reasoning_end = _reasoning_end(body, prompt, options)
    if use.parser is not None:
        field_names["structured_output"] = "tools"
        params = _with_call_grammar(params, use, reasoning_end)
    generation = Generation(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        model=model,
        created=int(time.time()),
        prompts=[prompt],
        params=[params],
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        stream=bool(body.stream),
        include_usage=includes_usage(body),
        field_names=field_names,
    )

    def create_parser(index: int) -> ChatOutputParser:
        salt = f"{generation.id}/{index}"
        return ChatOutputParser(
            use.parser,
            options.reasoning_parser,
            use.tools,
            reasoning_end is not None,
            id_salt=salt,
        )

    return generation, ChatFormat(body, vocabulary, create_parser)


def _params(
    body: ChatCompletionRequest,
    field_names: dict[str, str],
    use: ToolUse,
    options: ServerOptions,
) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise bad_request(
            f"max_completion_tokens ({newer}) and max_tokens ({older}) are one limit; send one",
            "max_completion_tokens",
        )
    return sampling_params(
        body,
        field_names,
        max_tokens=older if newer is None else newer,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        kept_special_tokens=_markers(use.parser, options.reasoning_parser) or None,
    )


def _markers(tool_parser: str | None, reasoning_parser: str | None) -> list[str]:
    """The parsers see these even where they are special tokens, and no other special token."""
    markers: list[str] = []
    if tool_parser is not None:
        markers += TOOL_PARSERS[tool_parser].markers
    if reasoning_parser is not None:
        markers += REASONING_PARSERS[reasoning_parser].markers
    return markers


def _with_call_grammar(
    params: SamplingParams, use: ToolUse, reasoning_end: str | None
) -> SamplingParams:
    """The parameters with the grammar that the tool choice needs, if it needs one.

    Args:
        reasoning_end: where the prompt opened reasoning, the marker that ends it.
    """
    assert use.parser is not None
    try:
        grammar = tool_call_grammar(use.parser, use.tools, use.mode, use.parallel)
        if grammar is None:
            return params
        # With `auto` all but calls is free, reasoning too.
        if use.mode != "auto" and reasoning_end is not None:
            grammar = msgspec.structs.replace(grammar, starts_after=reasoning_end)
        return msgspec.structs.replace(params, structured_output=grammar)
    except ValueError as error:
        raise bad_request(str(error), "tools") from None


def _reasoning_end(
    body: ChatCompletionRequest, prompt: Prompt, options: ServerOptions
) -> str | None:
    """The marker that ends the reasoning that the prompt opened; None when it opened none."""
    if options.reasoning_parser is None or prompt.text is None:
        return None
    continued = ""
    if body.continue_final_message:
        last = body.messages[-1].content or ""
        continued = last if isinstance(last, str) else "".join(part.text or "" for part in last)
    reasoning = REASONING_PARSERS[options.reasoning_parser]
    return reasoning.close if reasoning.is_open_after(prompt.text, continued) else None
