"""What the frontend and the engine process say to each other: tagged msgpack messages."""

from __future__ import annotations

from pathlib import Path

import msgspec

from atom.config import EngineConfig
from atom.messages import EngineLimits, EngineRequest, EngineStats, StepReport


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: build an engine.

    `log_level` is that of the frontend's `atom` logger.
    """

    config: EngineConfig
    log_level: int


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    request: EngineRequest


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


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The loop turns, though no step had to be reported lately."""

    stats: EngineStats


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The last message of an engine that met an unforeseen error."""

    message: str


ToEngine = Start | AddRequest | Abort | Shutdown
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
