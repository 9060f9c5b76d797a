"""The messages between frontend and engine process, as tagged msgpack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from atom.config import EngineConfig
from atom.messages import (
    EngineLimits,
    EngineRequest,
    EngineStats,
    ImageInput,
    ModelFacts,
    StepReport,
)
from atom.sampling_params import SamplingParams


class WireError(ValueError):
    """A message that no process of this version sends."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: build an engine.

    `log_level` is the level of the frontend's `atom` logger, `log_format` how its lines look.
    """

    config: EngineConfig
    log_level: int
    log_format: str = "text"


class SharedRequest(msgspec.Struct, frozen=True, array_like=True):
    """An `EngineRequest`; `prompt`, `params` and `images` are places in `AddRequests`' lists."""

    id: str
    prompt: int
    params: int
    seed: int
    priority: int
    cache_salt: str
    arrival_time: float
    turn: int
    images: int


class AddRequests(msgspec.Struct, frozen=True, tag=True):
    """Sequences to generate; a prompt, parameters or images shared by several are sent once."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    images: list[tuple[ImageInput, ...]]
    sequences: list[SharedRequest]

    @classmethod
    def of(cls, requests: Sequence[EngineRequest]) -> AddRequests:
        """Build from requests; a prompt, params or images object is sent once per identity."""
        prompts: dict[int, list[int]] = {}
        params: dict[int, SamplingParams] = {}
        images: dict[int, tuple[ImageInput, ...]] = {}
        places: tuple[dict[int, int], ...] = ({}, {}, {})
        sequences = []
        for request in requests:
            prompt, parameters = id(request.prompt_token_ids), id(request.params)
            prompts[prompt] = request.prompt_token_ids
            params[parameters] = request.params
            images[id(request.images)] = request.images
            sequences.append(
                SharedRequest(
                    request.id,
                    places[0].setdefault(prompt, len(places[0])),
                    places[1].setdefault(parameters, len(places[1])),
                    request.seed,
                    request.priority,
                    request.cache_salt,
                    request.arrival_time,
                    request.turn,
                    places[2].setdefault(id(request.images), len(places[2])),
                )
            )
        return cls([*prompts.values()], [*params.values()], [*images.values()], sequences)

    def requests(self) -> Iterator[EngineRequest]:
        """The requests, again with shared objects.

        Raises:
            WireError: when a place in the lists is none.
        """
        for sequence in self.sequences:
            places = (
                (sequence.prompt, len(self.prompts)),
                (sequence.params, len(self.params)),
                (sequence.images, len(self.images)),
            )
            if not all(0 <= place < count for place, count in places):
                raise WireError(
                    f"request {sequence.id!r} names a prompt, params or images not sent with it"
                )
            yield EngineRequest(
                id=sequence.id,
                prompt_token_ids=self.prompts[sequence.prompt],
                params=self.params[sequence.params],
                seed=sequence.seed,
                priority=sequence.priority,
                cache_salt=sequence.cache_salt,
                arrival_time=sequence.arrival_time,
                turn=sequence.turn,
                images=self.images[sequence.images],
            )


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Abort sequences."""

    ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process; unfinished sequences are dropped."""


class Found(msgspec.Struct, frozen=True, tag=True):
    """The model was found, and its weights will be loaded."""

    model: ModelFacts


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine accepts requests, `startup_seconds` after `Start`; `stats` has no counts yet."""

    limits: EngineLimits
    stats: EngineStats
    startup_seconds: float


class StartupFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be built.

    `is_users`: a wrong option or checkpoint, or too little memory, fully explained by `message`.
    Otherwise the engine's log has the traceback.
    """

    message: str
    is_users: bool


class Step(msgspec.Struct, frozen=True, tag=True):
    report: StepReport


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """The engine raised `RequestRefusedError` for a sequence."""

    id: str
    message: str
    param: str | None


class StepProgress(msgspec.Struct, frozen=True, array_like=True):
    """A running step: its tokens, the seconds so far, and the seconds it may take."""

    num_tokens: int
    seconds: float
    allowed_seconds: float

    @property
    def is_overdue(self) -> bool:
        return self.seconds > self.allowed_seconds


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent about every second; `step` is None while there is no work."""

    step: StepProgress | None


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The last message of an engine that failed."""

    message: str


ToEngine = Start | AddRequests | Abort | Shutdown
FromEngine = Found | Ready | StartupFailed | Step | RequestRefused | Heartbeat | EngineFailed

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises:
    WireError: for what is no such message.
    """
    return _decoded(_to_engine, data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises:
    WireError: for what is no such message.
    """
    return _decoded(_from_engine, data)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:  # texts that are no UTF-8 among them
        raise WireError(f"a message of {len(data)} bytes between processes: {error}") from error


def requests_address(socket_dir: Path) -> str:
    """The socket for messages to the engine."""
    return f"ipc://{socket_dir / 'requests'}"


def reports_address(socket_dir: Path) -> str:
    """The socket for messages from the engine."""
    return f"ipc://{socket_dir / 'reports'}"
