"""The engine for asyncio programs: it runs in a process of its own, this is its near end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

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
)
from atom.model_engine import wire
from atom.model_engine.engine_client import EngineClient
from atom.model_engine.mailbox import Mailbox
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

# The engine's process speaks about every second, whatever it does.
SILENT_SECONDS = 10.0
# Requests in flight are given up when an engine that does not answer goes on like that.
GIVE_UP_SECONDS = 20.0
_WATCH_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.02


class QueueFullError(RuntimeError):
    """More requests wait than `max_waiting_requests` allows; try again later."""


class EngineShuttingDownError(EngineDeadError):
    """The engine finishes what it has and takes nothing new."""


class EngineStuckError(EngineDeadError):
    """The engine's process lives, as far as is known, and does not answer."""


class AsyncEngine:
    """Generates for many readers at once. Built by `start`, ended by `shutdown`.

    All of it belongs to one event loop.

    Attributes:
        limits: what a request must fit in.
        stats: the engine's state as last reported, at most about a second old.
        vocabulary: text and bytes of single tokens.
    """

    def __init__(
        self,
        client: EngineClient,
        ready: wire.Ready,
        config: EngineConfig,
        model_name: str,
        tokenizer: PreTrainedTokenizerBase,
        max_waiting_requests: int | None,
        observer: EngineObserver | None,
    ) -> None:
        self.config = config
        self.limits: EngineLimits = ready.limits
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.stats = ready.stats
        self._client = client
        self._processor = OutputProcessor(tokenizer, config.seed, observer)
        self._max_waiting_requests = max_waiting_requests
        self._mailboxes: dict[str, Mailbox] = {}
        self._queued: list[EngineRequest] = []
        # In turns of the watch and not by the clock: when this end was held up itself, what the
        # engine said meanwhile is only read later.
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
        """Start the engine process and wait until it takes requests.

        `max_waiting_requests` bounds the sequences that wait for a place in the batch.

        Raises:
            ConfigError, WeightError: when an option or the checkpoint is wrong.
            EngineDeadError: when the engine failed otherwise; its log says more.
        """
        client = EngineClient()
        try:
            # The process imports its modules meanwhile.
            source = await asyncio.to_thread(resolve_model, config.model)
            client.send(wire.Start(config, logging.getLogger("atom").getEffectiveLevel()))
            tokenizer, ready = await asyncio.gather(
                asyncio.to_thread(load_tokenizer, source, config.model), client.wait_ready()
            )
        except BaseException:
            await client.kill()
            raise
        logger.info("the engine was ready after %.1f s", ready.startup_seconds)
        return cls(client, ready, config, source.name, tokenizer, max_waiting_requests, observer)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._processor.vocabulary

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._client.pid

    @property
    def trouble(self) -> str | None:
        """Why the engine cannot be expected to answer; None when it can.

        It is dead, or its process has been silent for 10 seconds, or its step takes longer than
        any step of so many tokens should.
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
        """Generate; yields deltas, or with `stream` false the one final output.

        A reader that lags gets merged deltas. A reader that leaves (break, cancellation,
        `aclose`) aborts the request in the engine; where an exception may keep the iterator
        alive, read it within `contextlib.aclosing`. Parameters of several prompts are prepared
        once, by the caller; then they cross to the engine once for all that begin together.

        Raises:
            RequestRefusedError: when the request can never run as given.
            RequestFailedError: when computing it raised an error, twice.
            QueueFullError: when too many wait.
            EngineDeadError: when the engine is dead, dies, does not answer, or shuts down.
        """
        self._check_open()
        prepared = PreparedParams.of(params)
        check_request(prompt_token_ids, prepared.params, self.limits)
        _check_text(request_id, "request_id")
        _check_text(cache_salt, "cache_salt")
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
        """Wait for the engine to end unexpectedly; returns the reason."""
        return await asyncio.shield(self._dead)

    async def shutdown(self, drain_seconds: float) -> None:
        """Refuse new requests, let the others finish until the deadline, end the process.

        Requests that do not finish in time end with finish_reason `abort`.
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
        """Raises QueueFullError when the new sequences would wait beyond the limit.

        The engine's numbers are a step old and this end's are not: while the engine reports
        no queue, its batch is taken to fill up first.
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
        """Take in what the engine says until it is dead."""
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
        """Give up what is in flight when the engine has not answered for too long."""
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
        """Fail the request that a sequence belongs to."""
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
        """Send with all that other prompts queue before the event loop turns."""
        if not self._queued:
            asyncio.get_running_loop().call_soon(self._send_queued)
        self._queued += requests

    def _send_queued(self) -> None:
        queued, self._queued = self._queued, []
        if queued and self._client.is_open:
            self._client.send(wire.AddRequests.of(queued))

    def _abort(self, sequence_ids: list[str]) -> None:
        self._send_queued()  # what is aborted must have been sent
        if sequence_ids and self._client.is_open:
            self._client.send(wire.Abort(sequence_ids))

    def _abort_all(self) -> None:
        ids = self._processor.unfinished_sequence_ids
        self._abort(ids)
        self._deliver([SequenceOutput(id=i, finish_reason=FinishReason.ABORT) for i in ids])

    def _die(self, reason: str) -> None:
        """Fail every request in flight; the first reason counts."""
        if self._dead.done():
            return
        logger.error("%s", reason)
        self._dead.set_result(reason)
        self._watcher.cancel()
        self._fail_all(EngineDeadError(reason))

    def _fail_all(self, error: EngineDeadError) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)


def _check_text(text: str, param: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestRefusedError(f"{param} is not valid Unicode: {error}", param) from error
