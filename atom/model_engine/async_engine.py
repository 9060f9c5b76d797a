"""Asyncio frontend of engines that run in processes of their own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atom.config import EngineConfig, ModelOptions
from atom.messages import (
    EngineDeadError,
    EngineRequest,
    EngineStats,
    FinishReason,
    ImageInput,
    ModelFacts,
    RequestRefusedError,
    SequenceOutput,
    StepReport,
    check_request,
    check_text,
)
from atom.model_engine.admission import NO_LIMITS, Admission, AdmissionLimits, QueueFullError
from atom.model_engine.processes.engine_client import EngineClient
from atom.model_engine.processes.spawn import EngineProcess, SpawnedEngines
from atom.model_engine.replicas.mailbox import Mailbox
from atom.model_engine.replicas.replica import Replica
from atom.model_engine.replicas.replica_set import Relaunch, ReplicaSet, StartedEngine
from atom.model_engine.replicas.router import Router
from atom.model_engine.replicas.total_stats import common_limits, total_stats
from atom.model_loader.generation_config import describe_defaults
from atom.model_loader.tokenizers.plain_tokenizer import PlainTokenizer
from atom.model_loader.tokenizers.tokenizer import load_text_tokenizer
from atom.multimodal.processors.base import ImageProcessor, VideoProcessor
from atom.multimodal.processors.table import (
    create_image_processor,
    create_video_processor,
    may_see,
)
from atom.outputs import RequestOutput
from atom.sampling_params import SamplingParams
from atom.text.detokenizer import Vocabulary
from atom.text.observer import NOBODY, Caller, EngineObserver, NullObserver
from atom.text.output_processor import OutputProcessor, request_id_of
from atom.text.prepared_params import PreparedParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "AsyncEngine",
    "EngineObserver",
    "EngineShuttingDownError",
    "EngineStuckError",
    "NullObserver",
    "QueueFullError",
    "RequestTimeoutError",
]

logger = logging.getLogger(__name__)

# On how many replicas in turn a request may be when they die; it may be what kills them.
MAX_TRIES = 3
_DRAIN_POLL_SECONDS = 0.02
_TOO_LATE = "the request was not finished within its timeout"


class RequestTimeoutError(RuntimeError):
    """The request's deadline passed before it was finished."""


class EngineShuttingDownError(EngineDeadError):
    """The engine finishes its requests and accepts no new ones."""


class EngineStuckError(EngineDeadError):
    """The engine process has not ended but does not respond."""


@dataclass(eq=False)
class _LiveRequest:
    """A request that is being read.

    `replica` is None while there is none that could take it.
    """

    sequences: list[EngineRequest]
    mailbox: Mailbox = field(default_factory=Mailbox)
    replica: Replica | None = None
    num_tries: int = 0


class AsyncEngine:
    """Generates for concurrent requests. Create with `start`, end with `shutdown`.

    With several replicas a request goes where its prefix is cached, else to the least loaded. When
    one dies, requests of which nobody has read anything yet are tried on another.

    Not thread-safe: use it from one event loop.

    Attributes:
        limits: what a request must fit in.
        model_type: of the model's config.
        sampling_defaults: the model's, for requests that do not give their own.
        vocabulary: text and bytes of single tokens.
        image_processor, video_processor: the model's; None if it reads no images, or no videos.
    """

    def __init__(
        self,
        engines: Sequence[StartedEngine],
        relaunch: Relaunch,
        config: EngineConfig,
        model_name: str,
        model_type: str,
        tokenizer: PlainTokenizer | PreTrainedTokenizerBase,
        admission: AdmissionLimits,
        observer: EngineObserver | None,
        sampling_defaults: Mapping[str, Any] | None = None,
        image_processor: ImageProcessor | None = None,
        video_processor: VideoProcessor | None = None,
    ) -> None:
        self.config = config
        self.image_processor = image_processor
        self.video_processor = video_processor
        self.limits = common_limits([ready.limits for _, ready in engines])
        self.model_name = model_name
        self.model_type = model_type
        self.sampling_defaults: Mapping[str, Any] = sampling_defaults or {}
        self.tokenizer = tokenizer
        self._processor = OutputProcessor(tokenizer, config.seed, observer)
        self._admission = Admission(admission)
        self._live: dict[str, _LiveRequest] = {}
        self._is_closing = False
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._shutdown_lock = asyncio.Lock()
        restarts = len(engines) > 1 and not config.parallel.couples_engines
        self._replicas = ReplicaSet(engines, relaunch if restarts else None, self)
        remembers = len(engines) > 1 and config.cache.enable_prefix_caching
        num_blocks = self.limits.num_blocks if remembers else 0
        self._router = Router(len(engines), self.limits.block_size, num_blocks)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        admission: AdmissionLimits = NO_LIMITS,
        observer: EngineObserver | None = None,
        spawned: SpawnedEngines | None = None,
    ) -> AsyncEngine:
        """Start the engine processes and wait until they accept requests.

        Args:
            admission: what may wait.
            spawned: the processes, where somebody has started them before.

        Raises:
            ConfigError, WeightError: when an option or the checkpoint is wrong.
            EngineDeadError: when an engine failed otherwise; its log says more.
        """
        engines = spawned or SpawnedEngines(config)
        placements = engines.placements
        clients = [
            EngineClient(process, placement.config)
            for process, placement in zip(engines.take(), placements, strict=True)
        ]
        try:
            model, *_ = await asyncio.gather(*(client.start() for client in clients))
            (tokenizer, *processors), *readies = await asyncio.gather(
                asyncio.to_thread(_readers, model, config.model),
                *(client.built() for client in clients),
            )
        except BaseException:
            await asyncio.gather(*(client.kill() for client in clients))
            raise
        slowest = max(ready.startup_seconds for ready in readies)
        logger.info("the engine was ready after %.1f s", slowest)

        async def relaunch(index: int) -> StartedEngine:
            client = EngineClient(EngineProcess(placements[index]), placements[index].config)
            try:
                await client.start()
                return client, await client.built()
            except BaseException:
                await client.kill()
                raise

        logger.info("%s", describe_defaults(model.sampling_defaults))
        return cls(
            list(zip(clients, readies, strict=True)),
            relaunch,
            config,
            model.name,
            model.model_type,
            tokenizer,
            admission,
            observer,
            model.sampling_defaults,
            *processors,
        )

    @property
    def vocabulary(self) -> Vocabulary:
        return self._processor.vocabulary

    @property
    def pids(self) -> list[int]:
        """Process ids of the living engines."""
        return [replica.pid for replica in self._replicas.living]

    @property
    def trouble(self) -> str | None:
        """Why no request is expected to be answered; None when one is."""
        return self._replicas.trouble

    @property
    def replicas(self) -> ReplicaSet:
        return self._replicas

    @property
    def stats(self) -> EngineStats:
        """The last reported state of all replicas together, at most about a second old."""
        return total_stats(self._replicas.stats)

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
        deadline: float | None = None,
        caller: Caller = NOBODY,
        images: tuple[ImageInput, ...] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt.

        Yields deltas, or a single final output if `stream` is false. Deltas are merged when the
        reader is slow. Leaving the iterator (break, cancellation, `aclose`) aborts the request; use
        `contextlib.aclosing` where an exception could keep the iterator alive.

        Args:
            params: for several prompts, pass one `PreparedParams`; it is then sent to the engine
                once for all prompts added in the same event loop iteration.
            deadline: seconds, `time.monotonic()`; what is unfinished then is aborted, and what
                still waits is never computed.
            caller: requests of several keys take turns.
            images: of the prompt, whose tokens have their places (`multimodal.items.expand`).

        Raises:
            RequestRefusedError: when the request can never run as given.
            RequestFailedError: when a step failed twice on it.
            QueueFullError: when more would wait, or be live, than may.
            RequestTimeoutError: when the deadline has passed.
            EngineDeadError: when the engine is dead, dies, does not answer, or shuts down.
        """
        self._check_open()
        prepared = PreparedParams.of(params)
        check_text(request_id, "request_id")
        check_text(cache_salt, "cache_salt")
        self._check(prompt_token_ids, prepared.params, deadline)
        num_prompt, n = len(prompt_token_ids), prepared.params.n
        with self._admission.admit(caller.key, n, num_prompt, self._num_waiting) as ticket:
            sequences = self._processor.add_request(
                request_id,
                prompt,
                prompt_token_ids,
                prepared,
                stream=stream,
                priority=priority,
                cache_salt=cache_salt,
                turn=ticket.turn,
                caller=caller,
                images=images,
                on_begin=lambda: self._admission.begin(ticket),
            )
            live = self._live[request_id] = _LiveRequest(sequences)
            try:
                self._place(live)
                finished = False
                while not finished:
                    output = await _before(deadline, live.mailbox)
                    finished = output.finished
                    ticket.num_output_tokens += sum(len(each.token_ids) for each in output.outputs)
                    yield output
            finally:
                del self._live[request_id]
                self._abort(live, self._processor.abort(request_id))
                self._leave(live)

    def _check(
        self, prompt_token_ids: list[int], params: SamplingParams, deadline: float | None
    ) -> None:
        """Refuse what can never run as given, or is too late."""
        if params.logits_processors:
            raise RequestRefusedError(
                "logits_processors are functions of another process; only LLM takes them",
                "logits_processors",
            )
        check_request(prompt_token_ids, params, self.limits)
        if deadline is not None and time.monotonic() >= deadline:
            raise RequestTimeoutError(_TOO_LATE)

    async def wait_dead(self) -> str:
        """Wait until no engine is left, and none will be; returns the reason."""
        return await asyncio.shield(self._dead)

    async def shutdown(self, drain_seconds: float) -> None:
        """Refuse new requests, wait up to `drain_seconds` for the running ones, then end the
        processes.

        Requests that are still unfinished end with finish_reason `abort`.
        """
        self._is_closing = True
        async with self._shutdown_lock:
            deadline = time.monotonic() + drain_seconds
            while self._has_live_requests and time.monotonic() < deadline:
                await asyncio.sleep(_DRAIN_POLL_SECONDS)
            if self._has_live_requests:
                self._abort_all()
            await self._replicas.stop()

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

    @property
    def _num_waiting(self) -> int:
        """Sequences that wait to be scheduled, less than none where there is room for more.

        The reported stats lag behind by a step, while the count of unfinished sequences here is
        current. If no queue is reported, up to max_num_seqs of them are assumed to run.
        """
        max_num_seqs = self.config.scheduler.max_num_seqs
        reported = [replica.stats for replica in self._replicas.living]
        num_running = sum(s.num_running if s.num_waiting else max_num_seqs for s in reported)
        return self._processor.num_unfinished_sequences - num_running

    def _place(self, live: _LiveRequest) -> None:
        """Send a request to a replica; without any it waits for `on_restarted`."""
        replicas = self._replicas.healthy or self._replicas.living
        if not replicas:
            return
        first = live.sequences[0]
        hashes = self._router.hashes(first.prompt_token_ids, first.cache_salt, first.images)
        loads = {replica.index: replica.num_sequences for replica in replicas}
        index = self._router.choose(hashes, len(first.prompt_token_ids), loads)
        self._router.record(index, hashes)
        live.replica = next(replica for replica in replicas if replica.index == index)
        live.num_tries += 1
        live.replica.num_sequences += len(live.sequences)
        live.replica.add(live.sequences)

    def _leave(self, live: _LiveRequest) -> None:
        if live.replica is not None:
            live.replica.num_sequences -= len(live.sequences)
            live.replica = None

    def _abort(self, live: _LiveRequest, sequence_ids: list[str]) -> None:
        if live.replica is not None:
            live.replica.abort(sequence_ids)

    def _abort_all(self) -> None:
        for live in self._live.values():
            self._abort(live, [sequence.id for sequence in live.sequences])
        ids = self._processor.unfinished_sequence_ids
        self._deliver([SequenceOutput(id=i, finish_reason=FinishReason.ABORT) for i in ids])

    def on_report(self, report: StepReport) -> None:
        self._deliver(report.outputs)
        for refused in report.refused:
            self.on_refused(refused.id, refused.error())

    def on_refused(self, sequence_id: str, error: Exception) -> None:
        """Abort the request that a sequence belongs to and raise `error` to its reader."""
        request_id = request_id_of(sequence_id)
        if (live := self._live.get(request_id)) is not None:
            self._abort(live, self._processor.abort(request_id))
            live.mailbox.fail(error)

    def on_stuck(self, replica: Replica, trouble: str) -> None:
        del replica
        for live in self._live.values():
            live.mailbox.fail(EngineStuckError(trouble))

    def on_lost(self, replica: Replica, reason: str) -> None:
        """Try requests elsewhere of which nobody has read anything; the others fail."""
        self._router.forget(replica.index)
        death = self._replicas.death
        if death is not None and not self._dead.done():
            self._dead.set_result(death)
        for request_id, live in self._live.items():
            if live.replica is not replica and (live.replica is not None or death is None):
                continue
            tries = self._processor.is_unfinished(request_id) and not live.mailbox.was_read
            if death is None and tries and live.num_tries < MAX_TRIES:
                self._leave(live)
                live.mailbox.discard()
                self._processor.restart(request_id)
                self._place(live)
            else:
                live.mailbox.fail(EngineDeadError(death or reason))

    def on_restarted(self) -> None:
        for live in self._live.values():
            if live.replica is None:
                self._place(live)

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        processed = self._processor.process(outputs)
        for sequence_id in processed.aborts:
            self._abort(self._live[request_id_of(sequence_id)], [sequence_id])
        for output in processed.outputs:
            self._live[output.request_id].mailbox.put(output)


def _readers(
    model: ModelFacts, options: ModelOptions
) -> tuple[PlainTokenizer | PreTrainedTokenizerBase, ImageProcessor | None, VideoProcessor | None]:
    """What reads texts, images and videos.

    Raises:
        ConfigError, WeightError: when an option or the checkpoint is wrong.
    """
    tokenizer = load_text_tokenizer(model, options)
    if not may_see(model, options):
        return tokenizer, None, None
    # It imports torch, which texts do without.
    from atom.model_loader.source import resolve_model

    source = resolve_model(options)
    return (
        tokenizer,
        create_image_processor(source, options, tokenizer),
        create_video_processor(source, options, tokenizer),
    )


async def _before(deadline: float | None, mailbox: Mailbox) -> RequestOutput:
    """The next output.

    Raises:
        RequestTimeoutError: when there is none by the deadline.
    """
    if deadline is None:
        return await mailbox.take()
    try:
        return await asyncio.wait_for(mailbox.take(), deadline - time.monotonic())
    except asyncio.TimeoutError:
        raise RequestTimeoutError(_TOO_LATE) from None
