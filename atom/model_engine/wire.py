"""What the frontend and the engine process say to each other: tagged msgpack messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from atom.config import EngineConfig
from atom.messages import EngineLimits, EngineRequest, EngineStats, StepReport
from atom.sampling_params import SamplingParams


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: build an engine.

    `log_level` is that of the frontend's `atom` logger.
    """

    config: EngineConfig
    log_level: int


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """An `EngineRequest` without what it shares; `prompt` and `params` are places in lists."""

    id: str
    prompt: int
    params: int
    seed: int
    priority: int
    cache_salt: str
    arrival_time: float


class AddRequests(msgspec.Struct, frozen=True, tag=True):
    """Sequences to generate; prompts and parameters that several share cross once."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    sequences: list[NewSequence]

    @classmethod
    def of(cls, requests: Sequence[EngineRequest]) -> AddRequests:
        """Requests that share an object are taken to share it for good."""
        prompts: dict[int, list[int]] = {}
        params: dict[int, SamplingParams] = {}
        places: tuple[dict[int, int], dict[int, int]] = ({}, {})
        sequences = []
        for request in requests:
            prompt, parameters = id(request.prompt_token_ids), id(request.params)
            prompts[prompt] = request.prompt_token_ids
            params[parameters] = request.params
            sequences.append(
                NewSequence(
                    request.id,
                    places[0].setdefault(prompt, len(places[0])),
                    places[1].setdefault(parameters, len(places[1])),
                    request.seed,
                    request.priority,
                    request.cache_salt,
                    request.arrival_time,
                )
            )
        return cls([*prompts.values()], [*params.values()], sequences)

    def requests(self) -> Iterator[EngineRequest]:
        """The requests, which share again what they shared."""
        for sequence in self.sequences:
            yield EngineRequest(
                id=sequence.id,
                prompt_token_ids=self.prompts[sequence.prompt],
                params=self.params[sequence.params],
                seed=sequence.seed,
                priority=sequence.priority,
                cache_salt=sequence.cache_salt,
                arrival_time=sequence.arrival_time,
            )


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End sequences; nothing more is wanted of them."""

    ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process in order, dropping what is unfinished."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine takes requests, that many seconds after `Start`; `stats` are all at zero."""

    limits: EngineLimits
    stats: EngineStats
    startup_seconds: float


class StartupFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be built.

    `is_users` tells a wrong option or checkpoint, which the message explains in full, from a
    failure whose traceback stands in the engine's log.
    """

    message: str
    is_users: bool


class Step(msgspec.Struct, frozen=True, tag=True):
    report: StepReport


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """A `RequestRefusedError` of the engine."""

    id: str
    message: str
    param: str | None


class StepProgress(msgspec.Struct, frozen=True, array_like=True):
    """A step that has begun and not ended: its tokens, its seconds so far, and at most."""

    num_tokens: int
    seconds: float
    allowed_seconds: float

    @property
    def is_overdue(self) -> bool:
        return self.seconds > self.allowed_seconds


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The process lives; `step` is None while it waits for work."""

    step: StepProgress | None


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The last message of an engine that met an unforeseen error."""

    message: str


ToEngine = Start | AddRequests | Abort | Shutdown
FromEngine = Ready | StartupFailed | Step | RequestRefused | Heartbeat | EngineFailed

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    return _from_engine.decode(data)


def requests_address(socket_dir: Path) -> str:
    """Where the frontend sends."""
    return f"ipc://{socket_dir / 'requests'}"


def reports_address(socket_dir: Path) -> str:
    """Where the engine sends."""
    return f"ipc://{socket_dir / 'reports'}"
