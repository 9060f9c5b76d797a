"""The one path from a prepared request to an answer, shared by completions and chat."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from atom.entrypoints.chat.prompt import Prompt
from atom.entrypoints.chat.speculation import SpeculationFields
from atom.entrypoints.http.edge import caller_of
from atom.entrypoints.http.errors import json_response, refused
from atom.entrypoints.http.sse import (
    DONE,
    EventStream,
    cancel,
    encode_event,
    wait_disconnected,
)
from atom.entrypoints.http.workers import Workers
from atom.messages import RequestRefusedError
from atom.model_engine.async_engine import AsyncEngine, EngineShuttingDownError
from atom.outputs import CompletionOutput, RequestOutput
from atom.text.observer import NOBODY, Caller
from atom.text.prepared_params import PreparedParams

Result = TypeVar("Result")
Choice = dict[str, Any]

# Prompts of one request that the engine is given in one turn of the event loop.
STARTED_AT_ONCE = 32


@dataclass(frozen=True)
class UsageChunks:
    """Which chunks of a stream hold the usage: a last one of its own, and every one so far.

    `speculation`: whether chunks and the usage say how tokens came.
    """

    last: bool = False
    every: bool = False
    speculation: bool = False


@dataclass(frozen=True)
class Generation:
    """What one HTTP request asks of the engine.

    Attributes:
        id: unlike that of any other request.
        params: those of every prompt.
        deadline: seconds, `time.monotonic()`, by which the answer must be finished.
        echoes: the prompt comes back.
        field_names: the request's own names of fields that the engine calls otherwise.
        answer_id: the client's name of the request, where answers say it; several may share one.
    """

    id: str
    model: str
    created: int
    prompts: list[Prompt]
    params: PreparedParams
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    stream: bool = False
    usage: UsageChunks = UsageChunks()
    echoes: bool = False
    field_names: dict[str, str] = field(default_factory=dict)
    answer_id: str = ""
    caller: Caller = NOBODY

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return self.params.params.n

    def spelling_size(self, request: RequestOutput) -> int:
        """About how many tokens must be spelled to say this output, alternatives included."""
        params = self.params.params
        num_tokens = sum(len(output.token_ids) for output in request.outputs)
        size = num_tokens * (1 + (params.logprobs or 0))
        is_first = request.prompt_logprobs is not None or not self.stream
        if is_first or self.echoes:
            size += len(request.prompt_token_ids) * (1 + (params.prompt_logprobs or 0))
        return size


class ChoiceFormat(Protocol):
    """How choices are spelled. `index` numbers the choices of the whole request."""

    response_object: str
    chunk_object: str

    def open(self, index: int, prompt: Prompt, request: RequestOutput) -> Choice | None:
        """What a stream says of a choice before its first token."""

    def delta(self, index: int, output: CompletionOutput) -> list[Choice]:
        """What a stream says of new tokens, after `open`; each choice is a chunk of its own."""

    def whole(
        self, index: int, prompt: Prompt, request: RequestOutput, output: CompletionOutput
    ) -> Choice: ...

    def response_fields(self, requests: list[RequestOutput]) -> dict[str, Any]:
        """Further fields of a whole response."""


def deadline_of(timeout: float | None) -> float | None:
    """When a request that is prepared now must be finished: `timeout` seconds from now."""
    return None if timeout is None else time.monotonic() + timeout


async def respond(
    request: Request,
    engine: AsyncEngine,
    generation: Generation,
    choices: ChoiceFormat,
    workers: Workers,
) -> Response:
    """Generate and answer, whole or as a stream; a client that leaves ends the generation.

    What goes wrong before the first token is still an HTTP status.

    Raises:
        ClientDisconnect: when nobody waits for the answer any more.
    """
    generation = replace(generation, caller=caller_of(request))
    if not generation.stream:
        requests = await unless_disconnected(request, collect(engine, generation))
        size = sum(map(generation.spelling_size, requests))
        return await workers.run(
            size,
            lambda: json_response(
                {**whole_response(generation, choices, requests), **fingerprint_field(engine)}
            ),
        )
    events = stream_events(engine, generation, choices, workers)
    first = await unless_disconnected(request, _first(events))
    return EventStream(first, events)


async def collect(engine: AsyncEngine, generation: Generation) -> list[RequestOutput]:
    """The final output of each prompt, in order; the first error ends all."""

    async def final(number: int) -> RequestOutput:
        async with aclosing(_generate(engine, generation, number)) as outputs:
            return await anext(outputs)

    tasks: list[asyncio.Task[RequestOutput]] = []
    try:
        await _start(tasks, final, len(generation.prompts))
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel(*tasks)


async def stream_events(
    engine: AsyncEngine, generation: Generation, choices: ChoiceFormat, workers: Workers
) -> AsyncGenerator[bytes, None]:
    """Server-sent events, as many at a time as one output of the engine makes."""
    head: dict[str, Any] = {
        "id": generation.id,
        "object": choices.chunk_object,
        "created": generation.created,
        "model": generation.model,
        **fingerprint_field(engine),
    }
    if generation.usage.last:
        head["usage"] = None
    speculation = SpeculationFields(engine.vocabulary) if generation.usage.speculation else None
    usage = Usage(speculation)
    chunks = ChunkChoices(generation, choices, speculation)
    async with aclosing(stream_outputs(engine, generation)) as outputs:
        async for number, request in outputs:
            usage.add(number, request)
            if speculation is not None:
                speculation.add(number * generation.n, request)
            if generation.usage.every:
                head = {**head, "usage": usage.as_dict()}
            spell = functools.partial(_spell, head, chunks, number, request)
            if events := await workers.run(generation.spelling_size(request), spell):
                yield events
    if generation.usage.last:
        yield encode_event({**head, "choices": [], "usage": usage.as_dict()})
    yield DONE


def fingerprint_field(engine: AsyncEngine) -> dict[str, str]:
    """What answers say where texts mean nothing; empty elsewhere."""
    fingerprint = engine.limits.fingerprint
    return {} if fingerprint is None else {"system_fingerprint": fingerprint}


class ChunkChoices:
    """What a stream says of each output of the engine, in order."""

    def __init__(
        self,
        generation: Generation,
        choices: ChoiceFormat,
        speculation: SpeculationFields | None = None,
    ) -> None:
        self._generation = generation
        self._choices = choices
        self._speculation = speculation
        self._opened: set[int] = set()

    def of(self, number: int, request: RequestOutput) -> Iterator[Choice]:
        """The choices of an output for prompt `number`."""
        prompt = self._generation.prompts[number]
        for output in request.outputs:
            index = number * self._generation.n + output.index
            if index not in self._opened:
                self._opened.add(index)
                opening = self._choices.open(index, prompt, request)
                if opening is not None:
                    yield opening
            said = self._choices.delta(index, output)
            if self._speculation is not None and said:
                said[0]["speculation"] = self._speculation.take(index)
            yield from said


def whole_response(
    generation: Generation, choices: ChoiceFormat, requests: list[RequestOutput]
) -> dict[str, Any]:
    usage = Usage()
    spelled = []
    for number, request in enumerate(requests):
        usage.add(number, request)
        base = number * generation.n
        for output in sorted(request.outputs, key=lambda output: output.index):
            prompt = generation.prompts[number]
            spelled.append(choices.whole(base + output.index, prompt, request, output))
    return {
        "id": generation.id,
        "object": choices.response_object,
        "created": generation.created,
        "model": generation.model,
        "choices": spelled,
        "usage": usage.as_dict(),
        **choices.response_fields(requests),
    }


class Usage:
    """Counts tokens over the outputs of a request, whole or in deltas."""

    def __init__(self, speculation: SpeculationFields | None = None) -> None:
        self._speculation = speculation
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._image_tokens: dict[int, int] = {}
        self._completion_tokens = 0

    def add(self, number: int, request: RequestOutput) -> None:
        self._prompt_tokens[number] = len(request.prompt_token_ids)
        self._cached_tokens[number] = request.num_cached_tokens
        self._image_tokens[number] = request.num_image_tokens
        self._completion_tokens += sum(len(output.token_ids) for output in request.outputs)

    def as_dict(self) -> dict[str, Any]:
        prompt_tokens = sum(self._prompt_tokens.values())
        counted: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
        }
        if image_tokens := sum(self._image_tokens.values()):
            counted["prompt_tokens_details"]["image_tokens"] = image_tokens
        if self._speculation is not None:
            counted["speculation"] = self._speculation.totals()
        return counted


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientDisconnect: when it did.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(wait_disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await cancel(task, watcher)


async def _generate(
    engine: AsyncEngine, generation: Generation, number: int
) -> AsyncGenerator[RequestOutput, None]:
    """One prompt's outputs: deltas of a stream, or the one final output."""
    prompt = generation.prompts[number]
    outputs = engine.generate(
        f"{generation.id}-{number}",
        prompt.token_ids,
        generation.params,
        prompt=prompt.text,
        stream=generation.stream,
        priority=generation.priority,
        deadline=generation.deadline,
        cache_salt=generation.cache_salt,
        caller=generation.caller,
        images=prompt.images,
    )
    try:
        async with aclosing(outputs):
            async for output in outputs:
                _check_not_aborted(output)
                yield output
    except RequestRefusedError as error:
        name = generation.field_names.get(error.param or "", error.param)
        raise refused(error, name) from error


async def stream_outputs(
    engine: AsyncEngine, generation: Generation
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The deltas of all prompts as they come, each with its prompt's number."""
    if len(generation.prompts) == 1:
        async with aclosing(_generate(engine, generation, 0)) as outputs:
            async for output in outputs:
                yield 0, output
        return

    # Room for one: what a slow reader has not taken stays in the engine, which merges it.
    merged: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(1)

    async def pump(number: int) -> None:
        try:
            async with aclosing(_generate(engine, generation, number)) as outputs:
                async for output in outputs:
                    await merged.put((number, output))
        except Exception as error:
            await merged.put((number, error))
        else:
            await merged.put((number, None))

    tasks: list[asyncio.Task[None]] = []
    try:
        await _start(tasks, pump, len(generation.prompts))
        running = len(tasks)
        while running:
            number, item = await merged.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        await cancel(*tasks)


async def _start(
    tasks: list[asyncio.Task[Result]],
    work: Callable[[int], Coroutine[Any, Any, Result]],
    count: int,
) -> None:
    """Add tasks for the numbers below `count`, some at a time: others get their turns between."""
    for number in range(count):
        tasks.append(asyncio.create_task(work(number)))
        if number % STARTED_AT_ONCE == STARTED_AT_ONCE - 1:
            await asyncio.sleep(0)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


def _spell(
    head: dict[str, Any], chunks: ChunkChoices, number: int, request: RequestOutput
) -> bytes:
    choices = chunks.of(number, request)
    return b"".join(encode_event({**head, "choices": [choice]}) for choice in choices)


def _check_not_aborted(request: RequestOutput) -> None:
    """Raises EngineDeadError: who still reads an aborted request met the drain deadline."""
    if any(output.finish_reason == "abort" for output in request.outputs):
        raise EngineShuttingDownError("the server shut down before the request was finished")
