"""Computes inputs of many requests in batches, in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from atom.config import EngineConfig
from atom.environment import omp_num_threads
from atom.messages import EngineDeadError, RequestFailedError
from atom.platform import select_platform
from atom.pooling.inputs import PoolingInput
from atom.pooling.load import LoadedModel, load_model
from atom.pooling.model import PoolingModel
from atom.pooling.source import PoolingSource
from atom.processors import default_num_threads

logger = logging.getLogger(__name__)

Rows = list[np.ndarray]


@dataclass(eq=False)
class _Request:
    """Attributes:
    left: numbers of the inputs that are not in a batch yet, the longest last.
    rows: results by the number of their input.
    """

    inputs: Sequence[PoolingInput]
    left: list[int]
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    future: Future[Rows] = field(default_factory=Future)


@dataclass(frozen=True)
class PoolingStats:
    """Inputs that are computed and that wait; totals since the start, padding not counted."""

    num_running: int
    num_waiting: int
    num_batches: int
    num_tokens: int


_Batch = list[tuple[_Request, int]]


class BatchQueue:
    """Inputs that wait, in batches.

    Each batch takes an input of every client in turn, and of each client's requests in turn, the
    longest first, while all of them, padded to the longest, stay within `max_tokens`; an input that
    is longer is a batch by itself. Used by any thread.

    Args:
        max_tokens, max_inputs: of a batch.
    """

    def __init__(self, max_tokens: int, max_inputs: int) -> None:
        self._max_tokens = max_tokens
        self._max_inputs = max_inputs
        # By client, in the order of their turns; no client is there without requests.
        self._waiting: dict[str, deque[_Request]] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Inputs."""
        with self._changed:
            return sum(len(request.left) for request in self._requests())

    def add(self, inputs: Sequence[PoolingInput], client: str = "") -> Future[Rows]:
        order = sorted(range(len(inputs)), key=lambda number: len(inputs[number].token_ids))
        request = _Request(inputs, order)
        with self._changed:
            if self._is_closed:
                raise EngineDeadError("the engine has been shut down")
            self._waiting.setdefault(client, deque()).append(request)
            self._changed.notify()
        return request.future

    def close(self) -> None:
        """Cancel what waits; `take` ends."""
        with self._changed:
            self._is_closed = True
            for request in self._requests():
                request.future.cancel()
            self._waiting.clear()
            self._changed.notify()

    def take(self) -> _Batch | None:
        """Wait for the next batch; None once the queue is closed."""
        with self._changed:
            while not self._is_closed:
                self._drop_cancelled()
                if self._waiting:
                    return self._next()
                self._changed.wait()
        return None

    def _requests(self) -> Iterator[_Request]:
        return chain.from_iterable(self._waiting.values())

    def _drop_cancelled(self) -> None:
        for client, requests in list(self._waiting.items()):
            self._waiting[client] = deque(r for r in requests if not r.future.done())
            if not self._waiting[client]:
                del self._waiting[client]

    def _next(self) -> _Batch:
        batch: _Batch = []
        width = 0
        while self._waiting and len(batch) < self._max_inputs:
            client, requests = next(iter(self._waiting.items()))
            request = requests[0]
            number = request.left[-1]
            width = max(width, len(request.inputs[number].token_ids))
            if batch and width * (len(batch) + 1) > self._max_tokens:
                break
            request.left.pop()
            batch.append((request, number))
            requests.popleft()
            if request.left:
                requests.append(request)
            del self._waiting[client]
            if requests:
                self._waiting[client] = requests
        return batch


class PoolingEngine:
    """A model that embeds or scores, and the thread that runs it.

    Attributes:
        loaded: the model, its limits and how its inputs are written.
        death: why the thread ended by itself; None if it has not.
        ended: is done when the thread is.
    """

    def __init__(self, config: EngineConfig, source: PoolingSource) -> None:
        self.config = config
        self.model_name = source.name
        self.loaded: LoadedModel = load_model(config, source)
        scheduler = config.scheduler
        self._queue = BatchQueue(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        self._num_running = self._num_tokens = self._num_batches = 0
        self.death: str | None = None
        self.ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="pooling", daemon=True)
        self._thread.start()

    @property
    def task(self) -> str:
        return "score" if self.loaded.embedding is None else "embed"

    @property
    def description(self) -> str:
        """What the model is, in words that begin a sentence."""
        does = "embeds texts" if self.loaded.scoring is None else "scores pairs of texts"
        return f"{self.model_name} {does}"

    @property
    def stats(self) -> PoolingStats:
        return PoolingStats(
            self._num_running, self._queue.num_waiting, self._num_batches, self._num_tokens
        )

    def submit(self, inputs: Sequence[PoolingInput], client: str = "") -> Future[Rows]:
        """Have a row computed for each input; cancelling the future gives up those that wait.

        Args:
            client: who takes turns with others.

        The future raises RequestFailedError when computing an input raised an error, also when it
        ran alone, or gave numbers that are not finite.
        """
        return self._queue.add(inputs, client)

    def compute(self, inputs: Sequence[PoolingInput]) -> Rows:
        """`submit`, and wait for the rows."""
        future = self.submit(inputs)
        try:
            return future.result()
        except BaseException:  # the caller was interrupted
            future.cancel()
            raise

    def shutdown(self) -> None:
        """Cancel what waits, and end after the batch that runs."""
        self._queue.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._run_batches()
        except BaseException as error:
            logger.critical("the engine died", exc_info=error)
            self.death = f"{type(error).__name__}: {error}"
            self._queue.close()
        self.ended.set_result(None)

    def _run_batches(self) -> None:
        if not select_platform(self.config.device).is_gpu:
            processors = default_num_threads()
            most = min(processors, omp_num_threads() or processors)
            torch.set_num_threads(self.config.parallel.num_threads or most)
        while (batch := self._queue.take()) is not None:
            self._num_running = len(batch)
            self._num_batches += 1
            self._num_tokens += sum(len(r.inputs[number].token_ids) for r, number in batch)
            try:
                with torch.inference_mode():
                    _compute(self.loaded.model, batch)
            except BaseException as error:
                for request, _ in batch:
                    _fail(request, f"the engine died: {type(error).__name__}: {error}")
                raise
            self._num_running = 0


def _compute(model: PoolingModel, batch: _Batch) -> None:
    """Compute a batch and tell its requests; one that raises is computed input by input."""
    try:
        rows = model.compute([request.inputs[number] for request, number in batch])
    except Exception as error:
        if len(batch) > 1:
            logger.warning(
                "a batch of %d inputs failed, each is tried alone: %s", len(batch), error
            )
            for each in batch:
                _compute(model, [each])
            return
        logger.error("an input failed", exc_info=error)
        _fail(batch[0][0], f"computing an input raised {type(error).__name__}: {error}")
        return
    for (request, number), row in zip(batch, rows, strict=True):
        if not np.isfinite(row).all():
            _fail(request, f"the result of input {number} is not finite")
            continue
        request.rows[number] = row
        if len(request.rows) == len(request.inputs):
            with contextlib.suppress(InvalidStateError):
                request.future.set_result([request.rows[i] for i in range(len(request.inputs))])


def _fail(request: _Request, message: str) -> None:
    with contextlib.suppress(InvalidStateError):
        request.future.set_exception(RequestFailedError(message))
