"""The real server over HTTP with a scripted model: every answer is a text that the test sets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import httpx
import uvicorn

from atom.entrypoints.http.connection import BoundedProtocol
from atom.entrypoints.server.app import create_app
from atom.entrypoints.server.listening import bind
from atom.entrypoints.server.watchers import create_metrics, watching
from atom.entrypoints.server_options import ServerOptions
from atom.messages import (
    EngineLimits,
    EngineRequest,
    EngineStats,
    FinishReason,
    ImageInput,
    SequenceOutput,
    StepReport,
)
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.async_engine import AsyncEngine
from atom.model_engine.processes import wire
from atom.multimodal.processors.base import ImageProcessor, VideoProcessor
from atom.sampling_params import SamplingParams

HEARTBEAT_SECONDS = 1.0


class ScriptedClient:
    """The far end of an `AsyncEngine`, in place of the engine process.

    Attributes:
        text: what every sequence answers.
        reply: instead of `text`, the answer to a prompt.
        tokens_per_step: as many come at once, as with speculation.
        drafts: instead of `tokens_per_step`, of a step by number: its drafts, the accepted ones and
            their source, for requests that let drafts be made.
        seconds_per_step: between steps.
        prompt, params, images: token ids, sampling parameters and images of the last request.
    """

    pid = 0
    is_alive = True
    is_open = True

    def __init__(self, tokenizer: Any) -> None:
        self.text = ""
        self.reply: Callable[[str], str] | None = None
        self.tokens_per_step = 1
        self.drafts: Callable[[int], tuple[int, int, str]] | None = None
        self.seconds_per_step = 0.0
        self.prompt: list[int] = []
        self.params: SamplingParams | None = None
        self.images: tuple[ImageInput, ...] = ()
        self._tokenizer = tokenizer
        self._reports: asyncio.Queue[wire.Step] = asyncio.Queue()
        self._aborted: set[str] = set()

    def send(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.AddRequests):
            for request in message.requests():
                self._answer(request)
        elif isinstance(message, wire.Abort):
            self._aborted |= set(message.ids)

    async def receive(self) -> list[wire.FromEngine]:
        while True:
            try:
                step = await asyncio.wait_for(self._reports.get(), HEARTBEAT_SECONDS)
            except asyncio.TimeoutError:
                return [wire.Heartbeat(None)]
            if step.report.outputs[0].id not in self._aborted:
                return [step]

    async def stop(self) -> None:
        self.is_open = False

    def _answer(self, request: EngineRequest) -> None:
        self.prompt, self.params = request.prompt_token_ids, request.params
        self.images = request.images
        text = self.text
        if self.reply is not None:
            text = self.reply(self._tokenizer.decode(self.prompt, skip_special_tokens=False))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        ids.append(self._tokenizer.eos_token_id)
        limit = request.params.max_tokens or len(ids)
        reason = FinishReason.LENGTH if limit < len(ids) else FinishReason.STOP
        ids = ids[:limit]
        outputs: list[SequenceOutput] = []
        while ids:
            size, counts = self.tokens_per_step, (0, 0, None)
            # The first step computes the prompt.
            if self.drafts is not None and outputs and request.params.speculation:
                counts = self.drafts(len(outputs))
                size = counts[1] + 1
            step, ids = ids[:size], ids[size:]
            outputs.append(
                SequenceOutput(
                    id=request.id,
                    token_ids=step,
                    finish_reason=None if ids else reason,
                    num_draft_tokens=counts[0],
                    num_accepted_tokens=counts[1],
                    draft_source=counts[2],
                )
            )
        self._report(outputs)

    def _report(self, outputs: list[SequenceOutput]) -> None:
        now = len(outputs) if not self.seconds_per_step else 1
        for output in outputs[:now]:
            report = StepReport(outputs=[output], stats=EngineStats())
            self._reports.put_nowait(wire.Step(report))
        if rest := outputs[now:]:
            loop = asyncio.get_running_loop()
            loop.call_later(self.seconds_per_step, self._report, rest)


class ScriptedServer:
    """Serves on a free loopback port from a thread of its own, until `stop`."""

    def __init__(
        self,
        tokenizer: Any,
        options: ServerOptions,
        max_model_len: int = 8000,
        sampling_defaults: Mapping[str, Any] | None = None,
        synthetic_acceptance_length: float | None = None,
        engine_options: Mapping[str, Any] | None = None,
        image_processor: ImageProcessor | None = None,
        video_processor: VideoProcessor | None = None,
    ) -> None:
        self.image_processor = image_processor
        self.video_processor = video_processor
        self._engine_config = engine_config(**(engine_options or {}))
        self._tokenizer = tokenizer
        self._synthetic_acceptance_length = synthetic_acceptance_length
        self._max_model_len = max_model_len
        self._options = options
        self._sampling_defaults = sampling_defaults
        self._sock = bind("127.0.0.1", 0)
        host, port = self._sock.getsockname()
        self.url = f"http://{host}:{port}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._ready.wait(60)

    def says(self, text: str, tokens_per_step: int = 1) -> None:
        self.model.text = text
        self.model.tokens_per_step = tokens_per_step

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def prompt(self) -> str:
        """The last prompt."""
        return str(self._tokenizer.decode(self.model.prompt, skip_special_tokens=False))

    def post(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, **kwargs)

    def drop_connections(self) -> None:
        """Break off all answers, as a network does."""

        def drop() -> None:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()

        self._loop.call_soon_threadsafe(drop)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.model = ScriptedClient(self._tokenizer)
        limits = EngineLimits(
            max_model_len=self._max_model_len,
            num_blocks=self._max_model_len // 8,
            block_size=16,
            vocab_size=len(self._tokenizer),
            max_logprobs=20,
            synthetic_acceptance_length=self._synthetic_acceptance_length,
        )
        metrics = create_metrics(self._options)

        async def relaunch(index: int) -> NoReturn:
            raise AssertionError(f"replica {index} ended")

        async with watching(self._options, None, metrics) as observer:
            engine = AsyncEngine(
                [(self.model, wire.Ready(limits, EngineStats(), 0.0))],  # type: ignore[list-item]
                relaunch,
                self._engine_config,
                "scripted",
                "llama",
                self._tokenizer,
                self._options.admission,
                observer,
                sampling_defaults=self._sampling_defaults,
                image_processor=self.image_processor,
                video_processor=self.video_processor,
            )
            app = create_app(engine, self._options, metrics)
            config = uvicorn.Config(
                app, log_config=None, lifespan="off", ws="none", http=BoundedProtocol
            )
            self._server = uvicorn.Server(config)
            self._sock.listen()  # from here on connections wait, and are not refused
            self._ready.set()
            await self._server.serve(sockets=[self._sock])
            await engine.shutdown(0)
