"""Splits requests into engine sequences, and turns the engine's outputs into `RequestOutput`s."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from atom.messages import EngineRequest, FinishReason, ImageInput, SequenceOutput
from atom.outputs import PositionLogprobs, RequestMetrics, RequestOutput
from atom.sampling_params import SamplingParams
from atom.stats import SpecDecodeCounter
from atom.text.detokenizer import create_vocabulary
from atom.text.observer import NOBODY, Caller, EngineObserver, FinishedRequest, NullObserver
from atom.text.prepared_params import PreparedParams
from atom.text.sequence_state import SequenceState, decode_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from atom.model_loader.tokenizers.plain_tokenizer import PlainTokenizer


@dataclass
class ProcessedOutputs:
    """Attributes:
    outputs: deltas, or results of finished requests.
    aborts: ids of sequences that a stop string ended; the caller must abort them in the engine.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _RequestState:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    stream: bool
    metrics: RequestMetrics
    create_sequence: Callable[[int], SequenceState]
    params: SamplingParams
    caller: Caller
    on_begin: Callable[[], None] | None
    num_image_tokens: int = 0
    sequences: list[SequenceState] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    spec_decode: SpecDecodeCounter = field(default_factory=partial(SpecDecodeCounter, warns=False))

    @property
    def live(self) -> list[SequenceState]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]


class OutputProcessor:
    """The unfinished requests of a frontend. Not thread-safe.

    `vocabulary`: text and bytes of single tokens.
    """

    def __init__(
        self,
        tokenizer: PlainTokenizer | PreTrainedTokenizerBase,
        seed: int | None,
        observer: EngineObserver | None = None,
    ) -> None:
        self.vocabulary = create_vocabulary(tokenizer)
        self._encode = partial(tokenizer.encode, add_special_tokens=False)
        self._seeds = random.Random(seed)
        self._observer = observer or NullObserver()
        self._requests: dict[str, _RequestState] = {}
        self._sequences: dict[str, tuple[_RequestState, SequenceState]] = {}

    @property
    def num_unfinished(self) -> int:
        """Unfinished requests."""
        return len(self._requests)

    @property
    def num_unfinished_sequences(self) -> int:
        return len(self._sequences)

    @property
    def unfinished_sequence_ids(self) -> list[str]:
        """Engine ids of all unfinished sequences."""
        return list(self._sequences)

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams | PreparedParams,
        *,
        stream: bool,
        priority: int = 0,
        cache_salt: str = "",
        turn: int = 0,
        caller: Caller = NOBODY,
        on_begin: Callable[[], None] | None = None,
        images: tuple[ImageInput, ...] = (),
    ) -> list[EngineRequest]:
        """Add a request; returns its n sequences for the engine.

        With `stream` its outputs are deltas, else there is one final output. Stop strings are
        matched here and not sent to the engine.

        Args:
            params: for several prompts, pass one `PreparedParams`.
            on_begin: called when its first token comes.
            images: of the prompt, whose tokens have their places.

        Raises:
            ValueError: when an unfinished request has this id.
        """
        if request_id in self._requests:
            raise ValueError(f"a request with the id {request_id!r} is still unfinished")
        arrival_time = time.monotonic()
        prepared = PreparedParams.of(params)
        prepared.spell_bad_words(self._encode)
        given = prepared.params

        def create_sequence(index: int) -> SequenceState:
            return SequenceState(
                f"{request_id}/{index}",
                index,
                given,
                self.vocabulary,
                prepared.stops,
                prompt_token_ids,
                prepared.create_end() if prepared.create_end is not None else None,
            )

        metrics = RequestMetrics(arrival_time)
        num_image_tokens = sum(image.num_tokens for image in images)
        state = _RequestState(
            request_id,
            prompt,
            prompt_token_ids,
            stream,
            metrics,
            create_sequence,
            given,
            caller,
            on_begin,
            num_image_tokens,
        )
        self._requests[request_id] = state
        self._begin(state, given.n)
        return [
            EngineRequest(
                id=sequence.id,
                prompt_token_ids=prompt_token_ids,
                params=prepared.for_engine(sequence.index),
                seed=self._draw_seed()
                if given.seed is None
                else child_seed(given.seed, sequence.index),
                priority=priority,
                cache_salt=cache_salt,
                arrival_time=arrival_time,
                turn=turn,
                images=images,
            )
            for sequence in state.sequences
        ]

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self._requests

    def restart(self, request_id: str) -> None:
        """Forget all outputs of an unfinished request; its sequences run anew in another engine."""
        state = self._requests[request_id]
        state.prompt_logprobs = state.num_cached_tokens = None
        state.spec_decode = SpecDecodeCounter(warns=False)
        self._begin(state, len(state.sequences))

    def _begin(self, state: _RequestState, n: int) -> None:
        state.sequences = [state.create_sequence(index) for index in range(n)]
        for sequence in state.sequences:
            self._sequences[sequence.id] = (state, sequence)

    def process(self, outputs: Iterable[SequenceOutput]) -> ProcessedOutputs:
        """Process outputs of the engine; those of unknown or ended sequences are ignored."""
        processed = ProcessedOutputs()
        now = time.monotonic()
        touched: dict[str, _RequestState] = {}
        for output in outputs:
            found = self._sequences.get(output.id)
            if found is None:  # aborted, or ended by a stop string, in the meantime
                continue
            state, sequence = found
            self._apply(state, sequence, output, now)
            touched[state.request_id] = state
            if sequence.finish_reason is not None:
                del self._sequences[output.id]
                if output.finish_reason is None:
                    processed.aborts.append(output.id)
        for state in touched.values():
            due = self._deliver(state, now)
            if due is not None:
                processed.outputs.append(due)
        return processed

    def abort(self, request_id: str) -> list[str]:
        """Drop a request; returns the engine ids to abort, none if it has ended."""
        state = self._requests.get(request_id)
        if state is None:
            return []
        live = state.live
        for sequence in live:
            sequence.finish_reason = FinishReason.ABORT
            del self._sequences[sequence.id]
        self._finish(state, time.monotonic())
        return [sequence.id for sequence in live]

    def _apply(
        self, state: _RequestState, sequence: SequenceState, output: SequenceOutput, now: float
    ) -> None:
        metrics = state.metrics
        metrics.num_preemptions += output.num_preemptions - sequence.num_preemptions
        sequence.num_preemptions = output.num_preemptions
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = output.first_scheduled_time
        if state.num_cached_tokens is None:
            # Only of the first sequence: the others find the prompt that it computed.
            state.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            state.prompt_logprobs = [
                None if position is None else decode_logprobs(position, self.vocabulary)
                for position in output.prompt_logprobs
            ]
        state.spec_decode.count(
            output.num_draft_tokens, output.num_accepted_tokens, output.draft_source
        )
        num_new = sequence.apply(output)
        if not num_new:
            return
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            self._observer.on_first_token(now - metrics.arrival_time, len(state.prompt_token_ids))
            if state.on_begin is not None:
                state.on_begin()
        previous = sequence.last_token_time
        self._observer.on_tokens(num_new, None if previous is None else now - previous)
        metrics.last_token_time = sequence.last_token_time = now

    def _deliver(self, state: _RequestState, now: float) -> RequestOutput | None:
        """The output to deliver now, if any."""
        finished = not state.live
        if finished:
            self._finish(state, now)
        elif not state.stream:
            return None
        taken = [sequence.take_output() for sequence in state.sequences]
        completions = [completion for completion in taken if completion is not None]
        if not completions:
            return None
        prompt_logprobs, state.prompt_logprobs = state.prompt_logprobs, None
        return RequestOutput(
            request_id=state.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=completions,
            finished=finished,
            metrics=state.metrics,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=state.num_cached_tokens or 0,
            num_image_tokens=state.num_image_tokens,
            spec_decode=state.spec_decode.snapshot(),
        )

    def _finish(self, state: _RequestState, now: float) -> None:
        del self._requests[state.request_id]
        state.metrics.finished_time = now
        reasons = [sequence.finish_reason for sequence in state.sequences]
        first = FinishReason.ABORT if FinishReason.ABORT in reasons else reasons[0]
        assert first is not None
        self._observer.on_request_finished(
            FinishedRequest(
                state.caller,
                state.params,
                state.metrics,
                first.value,
                len(state.prompt_token_ids),
                state.num_cached_tokens or 0,
                sum(sequence.num_tokens for sequence in state.sequences),
            )
        )

    def _draw_seed(self) -> int:
        return self._seeds.getrandbits(63)


def request_id_of(sequence_id: str) -> str:
    """The request id of an engine id."""
    return sequence_id.rpartition("/")[0]


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request with a seed.

    Completion 0 has the request's own seed, so it does not depend on n. The others have the first 8
    bytes of BLAKE2b of `"<seed>/<index>"`, big-endian, without the top bit.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
