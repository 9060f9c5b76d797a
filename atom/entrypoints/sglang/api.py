"""`/generate`, SGLang's native API: a completion whose stream repeats the text so far."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from atom.entrypoints.chat.generation import (
    Generation,
    collect,
    fingerprint_field,
    stream_outputs,
    unless_disconnected,
)
from atom.entrypoints.chat.protocol import CompletionRequest
from atom.entrypoints.chat.tokenization import PromptEncoder
from atom.entrypoints.chat.translation import renamed
from atom.entrypoints.http.body import describe
from atom.entrypoints.http.edge import caller_of
from atom.entrypoints.http.errors import ApiError, bad_request, json_response
from atom.entrypoints.http.sse import DONE, EventStream, encode_event
from atom.entrypoints.http.workers import Workers
from atom.entrypoints.openai.completions import prepare_completion
from atom.entrypoints.sglang.protocol import GenerateRequest, GenerateSampling
from atom.model_engine.async_engine import AsyncEngine
from atom.outputs import CompletionOutput, RequestOutput

# The completion's names of fields that are called otherwise here.
COMPLETION_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}

FIELD_NAMES = {
    COMPLETION_NAMES.get(name, name): f"sampling_params.{name}"
    for name in GenerateSampling.model_fields
}


def prepare_generate(
    body: GenerateRequest, model: str, encoder: PromptEncoder, defaults: Mapping[str, Any]
) -> Generation:
    """Tokenise and validate.

    Args:
        defaults: the model's sampling parameters.

    Raises:
        ApiError: 400 for what cannot be generated as asked.
    """
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("send either text or input_ids", "text")
    names = {**FIELD_NAMES, "prompt": "input_ids" if body.text is None else "text"}
    given = body.sampling_params.model_dump(exclude_none=True)
    fields = {COMPLETION_NAMES.get(name, name): value for name, value in given.items()}
    fields |= {
        "prompt": body.input_ids if body.text is None else body.text,
        "stream": body.stream,
        "priority": body.priority,
        "timeout": body.timeout,
    }
    try:
        completion = CompletionRequest.model_validate(fields)
        generation = prepare_completion(completion, model, encoder, defaults)
    except ValidationError as error:
        raise renamed(describe(error), names) from None
    except ApiError as error:
        raise renamed(error, names) from None
    if urls := image_urls(body):
        if len(generation.prompts) > 1:
            raise bad_request(
                "image_data goes with one prompt; send several requests", "image_data"
            )
        prompt = encoder.with_images(generation.prompts[0], urls, "image_data")
        generation = replace(generation, prompts=[prompt])
    names["structured_output"] = names[generation.field_names.get("structured_output", "prompt")]
    return replace(generation, answer_id=body.rid or generation.id, field_names=names)


def image_urls(body: GenerateRequest) -> list[str]:
    """The request's images by their URLs; a file in base64 says itself of what type it is."""
    given = body.image_data or []
    data = [given] if isinstance(given, str) else given
    return [each if ":" in each[:8] else f"data:;base64,{each}" for each in data]


async def respond_generate(
    request: Request, engine: AsyncEngine, generation: Generation, is_batch: bool, workers: Workers
) -> Response:
    """Generate and answer, whole or as a stream.

    Args:
        is_batch: whether the answer is a list, and events of a stream have an index.

    Raises:
        ClientDisconnect: when nobody waits for the answer any more.
    """
    generation = replace(generation, caller=caller_of(request))
    started, extra = time.monotonic(), fingerprint_field(engine)
    if not generation.stream:
        requests = await unless_disconnected(request, collect(engine, generation))

        def spell() -> Response:
            answers = [
                _Progress(generation, started, extra).add(request, output)
                for request in requests
                for output in sorted(request.outputs, key=lambda output: output.index)
            ]
            return json_response(answers if is_batch else answers[0])

        return await workers.run(sum(map(generation.spelling_size, requests)), spell)
    events = _events(engine, generation, is_batch, started)
    first = await unless_disconnected(request, _first(events))
    return EventStream(first, events)


async def _events(
    engine: AsyncEngine, generation: Generation, is_batch: bool, started: float
) -> AsyncGenerator[bytes, None]:
    progress: dict[int, _Progress] = {}
    extra = fingerprint_field(engine)
    async with aclosing(stream_outputs(engine, generation)) as outputs:
        async for number, request in outputs:
            data = b""
            for output in request.outputs:
                index = number * generation.n + output.index
                if index not in progress:
                    progress[index] = _Progress(generation, started, extra)
                answer = progress[index].add(request, output)
                data += encode_event({**answer, "index": index} if is_batch else answer)
            if data:
                yield data
    yield DONE


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


class _Progress:
    """One text as far as it has come; `extra` is said of each in `meta_info`."""

    def __init__(self, generation: Generation, started: float, extra: Mapping[str, str]) -> None:
        self._extra = extra
        self._generation = generation
        self._started = started
        self._text: list[str] = []
        self._token_ids: list[int] = []

    def add(self, request: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        self._text.append(output.text)
        self._token_ids += output.token_ids
        return {
            "text": "".join(self._text),
            "output_ids": self._token_ids,
            "meta_info": {
                "id": self._generation.answer_id,
                "finish_reason": self._finish_reason(output),
                "prompt_tokens": len(request.prompt_token_ids),
                "completion_tokens": len(self._token_ids),
                "cached_tokens": request.num_cached_tokens,
                "e2e_latency": time.monotonic() - self._started,
                **self._extra,
            },
        }

    def _finish_reason(self, output: CompletionOutput) -> dict[str, Any] | None:
        if output.finish_reason is None:
            return None
        if output.finish_reason != "stop":
            return {"type": output.finish_reason, "length": len(self._token_ids)}
        # The model's own end token is the last one.
        own = self._token_ids[-1] if self._token_ids else None
        matched = own if output.stop_reason is None else output.stop_reason
        return {"type": "stop", "matched": matched}
