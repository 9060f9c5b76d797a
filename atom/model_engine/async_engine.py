"""Asyncio frontend of an engine that runs in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from atom.config import EngineConfig
from atom.messages import (
    EngineDeadError,
    EngineLimits,
    EngineRequest,
    FinishReason,
    RequestRefusedError,
    SequenceOutput,
    check_request,
    check_text,
)
from atom.model_engine import wire
from atom.model_engine.engine_client import EngineClient
from atom.model_engine.mailbox import Mailbox
from atom.model_loader.generation_config import describe_defaults
from atom.model_loader.source import resolve_model
from atom.model_loader.tokenizer import load_tokenizer
from atom.outputs import RequestOutput
from atom.sampling_params import SamplingParams
from atom.text.detokenizer import Vocabulary
from atom.text.observer import EngineObserver, NullObserver
from atom.text.output_processor import OutputProcessor, request_id_of
from atom.text.prepared_params import PreparedParams

__all__ = [
    "AsyncEngine",
    "EngineObserver",
    "EngineShuttingDownError",
    "EngineStuckError",
    "NullObserver",
    "QueueFullError",
]

logger = logging.getLogger(__name__)

# The engine process sends a heartbeat about every second, even during a long step.
SILENT_SECONDS = 10.0
# After this time without an answer, requests in flight fail with EngineStuckError.
GIVE_UP_SECONDS = 20.0
_WATCH_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.02


class QueueFullError(RuntimeError):
    """More sequences are waiting than `max_waiting_requests` allows; try again later."""


class EngineShuttingDownError(EngineDeadError):
    """The engine finishes its requests and accepts no new ones."""


class EngineStuckError(EngineDeadError):
    """The engine process has not ended but does not respond."""


class AsyncEngine:
    """Generates for concurrent requests. Create with `start`, end with `shutdown`.

    Not thread-safe: use it from one event loop.

    Attributes:
        limits: what a request must fit in.
        model_type: of the model's config.
        sampling_defaults: the model's, for requests that do not give their own.
        stats: the last reported engine state, at most about a second old.
        vocabulary: text and bytes of single tokens.
    """

    def __init__(
        self,
        client: EngineClient,
        ready: wire.Ready,
        config: EngineConfig,
        model_name: str,
        model_type: str,
        tokenizer: PreTrainedTokenizerBase,
        max_waiting_requests: int | None,
        observer: EngineObserver | None,
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.limits: EngineLimits = ready.limits
        self.model_name = model_name
        self.model_type = model_type
        self.sampling_defaults: Mapping[str, Any] = sampling_defaults or {}
        self.tokenizer = tokenizer
        self.stats = ready.stats
        self._client = client
        self._processor = OutputProcessor(tokenizer, config.seed, observer)
        self._max_waiting_requests = max_waiting_requests
        self._mailboxes: dict[str, Mailbox] = {}
        self._queued: list[EngineRequest] = []
        # Counted in ticks of `_watch`, not in seconds: if this process was blocked, the engine's
        # messages are still unread, which does not mean that it was silent.
        self._num_silent = 0
        self._num_stuck = 0
        self._step: wire.StepProgress | None = None
        self._is_closing = False
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._shutdown_lock = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        max_waiting_requests: int | None = None,
        observer: EngineObserver | None = None,
    ) -> AsyncEngine:
        """Start the engine process and wait until it accepts requests.

        Args:
            max_waiting_requests: limit on sequences that wait to be scheduled; None for no limit.

        Raises:
            ConfigError, WeightError: when an option or the checkpoint is wrong.
            EngineDeadError: when the engine failed otherwise; its log says more.
        """
        client = EngineClient()
        try:
            # The engine process imports its modules in the meantime.
            source = await asyncio.to_thread(resolve_model, config.model)
            client.send(wire.Start(config, logging.getLogger("atom").getEffectiveLevel()))
            tokenizer, ready = await asyncio.gather(
                asyncio.to_thread(load_tokenizer, source, config.model), client.wait_ready()
            )
        except BaseException:
            await client.kill()
            raise
        logger.info("the engine was ready after %.1f s", ready.startup_seconds)
        model = (source.name, source.hf_config.model_type, tokenizer)
        logger.info("%s", describe_defaults(source.sampling_defaults))
        defaults = source.sampling_defaults
        return cls(client, ready, config, *model, max_waiting_requests, observer, defaults)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._processor.vocabulary

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._client.pid

    @property
    def trouble(self) -> str | None:
        """Why the engine is not expected to answer; None when it is healthy.

        It has died, or sent no message for 10 seconds, or its current step takes longer than
        `StepPace` allows for its number of tokens.
        """
        if self._dead.done():
            return self._dead.result()
        if not self._client.is_alive:
            return "the engine process has ended"
        if self._num_silent * _WATCH_SECONDS >= SILENT_SECONDS:
            return "the engine process is silent"
        if self._step is not None and self._step.is_overdue:
            return (
                f"the engine's step of {self._step.num_tokens} tokens has taken "
                f"{self._step.seconds:.0f} s, more than {self._step.allowed_seconds:.0f} s"
            )
        return None

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | PreparedParams,
        *,
        prompt: str | None = None,
        stream: bool = True,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt.

        Yields deltas, or a single final output if `stream` is false. Deltas are merged when the
        reader is slow. Leaving the iterator (break, cancellation, `aclose`) aborts the request; use
        `contextlib.aclosing` where an exception could keep the iterator alive.

        Args:
            params: for several prompts, pass one `PreparedParams`; it is then sent to the engine
                once for all prompts added in the same event loop iteration.

        Raises:
            RequestRefusedError: when the request can never run as given.
            RequestFailedError: when a step failed twice on it.
            QueueFullError: when `max_waiting_requests` would be exceeded.
            EngineDeadError: when the engine is dead, dies, does not answer, or shuts down.
        """
        self._check_open()
        prepared = PreparedParams.of(params)
        if prepared.params.logits_processors:
            raise RequestRefusedError(
                "logits_processors are functions of another process; only LLM takes them",
                "logits_processors",
            )
        check_request(prompt_token_ids, prepared.params, self.limits)
        check_text(request_id, "request_id")
        check_text(cache_salt, "cache_salt")
        self._check_queue(prepared.params.n)
        requests = self._processor.add_request(
            request_id,
            prompt,
            prompt_token_ids,
            prepared,
            stream=stream,
            priority=priority,
            cache_salt=cache_salt,
        )
        mailbox = self._mailboxes[request_id] = Mailbox()
        try:
            self._queue(requests)
            finished = False
            while not finished:
                output = await mailbox.take()
                finished = output.finished
                yield output
        finally:
            del self._mailboxes[request_id]
            self._abort(self._processor.abort(request_id))

    async def wait_dead(self) -> str:
        """Wait until the engine ends unexpectedly; returns the reason."""
        return await asyncio.shield(self._dead)

    async def shutdown(self, drain_seconds: float) -> None:
        """Refuse new requests, wait up to `drain_seconds` for the running ones, then end the
        process.

        Requests that are still unfinished end with finish_reason `abort`.
        """
        self._is_closing = True
        async with self._shutdown_lock:
            if not self._client.is_open:
                return
            deadline = time.monotonic() + drain_seconds
            while self._has_live_requests and time.monotonic() < deadline:
                await asyncio.sleep(_DRAIN_POLL_SECONDS)
            if self._has_live_requests:
                self._abort_all()
            self._reader.cancel()
            self._watcher.cancel()
            await self._client.stop()

    @property
    def _has_live_requests(self) -> bool:
        return bool(self._processor.num_unfinished) and not self._dead.done()

    def _check_open(self) -> None:
        if self._dead.done():
            raise EngineDeadError(self._dead.result())
        if self._is_closing:
            raise EngineShuttingDownError("the engine is shutting down")
        if (trouble := self.trouble) is not None:
            raise EngineStuckError(trouble)

    def _check_queue(self, num_new: int) -> None:
        """Raise QueueFullError when `num_new` more waiting sequences would exceed the limit.

        The reported stats lag behind by a step, while the count of unfinished sequences here is
        current. If no queue is reported, up to max_num_seqs of them are assumed to run.
        """
        if self._max_waiting_requests is None:
            return
        max_num_seqs = self.config.scheduler.max_num_seqs
        num_running = self.stats.num_running if self.stats.num_waiting else max_num_seqs
        num_waiting = self._processor.num_unfinished_sequences - num_running
        if num_waiting + num_new > self._max_waiting_requests:
            raise QueueFullError(
                f"{max(0, num_waiting)} sequences are waiting and {num_new} more would exceed "
                f"max_waiting_requests={self._max_waiting_requests}; try again later"
            )

    async def _read(self) -> None:
        """Receive messages from the engine until it is dead."""
        try:
            while True:
                messages = await self._client.receive()
                self._num_silent = 0
                for message in messages:
                    self._handle(message)
        except EngineDeadError as error:
            self._die(str(error))
        except Exception as error:
            logger.exception("cannot go on reading from the engine")
            self._die(f"{type(error).__name__}: {error}")

    async def _watch(self) -> None:
        """Fail the requests in flight when the engine has not responded for too long."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self._num_silent += 1
            trouble = self.trouble
            if trouble is None:
                self._num_stuck = 0
                continue
            if not self._num_stuck:
                logger.error("%s", trouble)
            self._num_stuck += 1
            if self._num_stuck * _WATCH_SECONDS > GIVE_UP_SECONDS:
                self._fail_all(EngineStuckError(trouble))

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Step(report):
                self._step = None
                self.stats = report.stats
                self._deliver(report.outputs)
                for refused in report.refused:
                    self._refuse(refused.id, refused.error())
            case wire.Heartbeat(step):
                self._step = step
            case wire.RequestRefused(sequence_id, text, param):
                self._refuse(sequence_id, RequestRefusedError(text, param))
            case wire.EngineFailed(text):
                self._die(f"the engine failed: {text}")
            case wire.Ready() | wire.StartupFailed():
                raise TypeError("the engine was ready already")

    def _refuse(self, sequence_id: str, error: Exception) -> None:
        """Abort the request that a sequence belongs to and raise `error` to its reader."""
        request_id = request_id_of(sequence_id)
        self._abort(self._processor.abort(request_id))
        if request_id in self._mailboxes:
            self._mailboxes[request_id].fail(error)

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        processed = self._processor.process(outputs)
        self._abort(processed.aborts)
        for output in processed.outputs:
            self._mailboxes[output.request_id].put(output)

    def _queue(self, requests: list[EngineRequest]) -> None:
        """Send at the next event loop iteration, in one message with requests queued until then."""
        if not self._queued:
            asyncio.get_running_loop().call_soon(self._send_queued)
        self._queued += requests

    def _send_queued(self) -> None:
        queued, self._queued = self._queued, []
        if queued and self._client.is_open:
            self._client.send(wire.AddRequests.of(queued))

    def _abort(self, sequence_ids: list[str]) -> None:
        self._send_queued()  # an abort must not overtake its request
        if sequence_ids and self._client.is_open:
            self._client.send(wire.Abort(sequence_ids))

    def _abort_all(self) -> None:
        ids = self._processor.unfinished_sequence_ids
        self._abort(ids)
        self._deliver([SequenceOutput(id=i, finish_reason=FinishReason.ABORT) for i in ids])

    def _die(self, reason: str) -> None:
        """Fail every request in flight; only the first call has an effect."""
        if self._dead.done():
            return
        logger.error("%s", reason)
        self._dead.set_result(reason)
        self._watcher.cancel()
        self._fail_all(EngineDeadError(reason))

    def _fail_all(self, error: EngineDeadError) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)
