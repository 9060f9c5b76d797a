"""The engine in a process of its own: `python -m atom.model_engine.engine_process`.

The frontend starts it, talks to it over two ZMQ sockets and ends it. It ends by itself when
its standard input closes, that is when the frontend is gone.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import zmq

from atom.config import ConfigError, EngineConfig
from atom.messages import (
    EngineLimits,
    EngineRequest,
    EngineStats,
    RequestRefusedError,
    SequenceOutput,
    StepReport,
)
from atom.model_engine import wire

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
# How long the last words may take to reach the frontend.
_LINGER_MS = 2000


class Core(Protocol):
    """What the loop needs of `EngineCore`."""

    limits: EngineLimits

    @property
    def has_work(self) -> bool: ...
    @property
    def stats(self) -> EngineStats: ...
    def add_request(self, request: EngineRequest) -> None: ...
    def abort(self, ids: Iterable[str]) -> list[SequenceOutput]: ...
    def step(self) -> StepReport: ...
    def shutdown(self) -> None: ...


class EngineLoop:
    """Takes messages between steps, and reports after each.

    Heartbeats come from this loop and no other thread, so that a stuck step shows.
    """

    def __init__(
        self,
        requests: zmq.Socket[bytes],
        reports: zmq.Socket[bytes],
        create_core: Callable[[EngineConfig], Core],
    ) -> None:
        self._requests = requests
        self._reports = reports
        self._create_core = create_core
        self._last_sent = time.monotonic()

    def run(self) -> int:
        """Serve until told to shut down; returns the exit status of the process."""
        core = self._start()
        if core is None:
            return 1
        try:
            while self._turn(core):
                pass
            core.shutdown()
        except Exception as error:
            logger.exception("the engine failed")
            self._send(wire.EngineFailed(_describe(error)))
            return 1
        return 0

    def _start(self) -> Core | None:
        message = wire.decode_to_engine(self._requests.recv())
        if not isinstance(message, wire.Start):
            raise TypeError(f"the first message must be Start, got {type(message).__name__}")
        logging.getLogger("atom").setLevel(message.log_level)
        begin = time.monotonic()
        try:
            core = self._create_core(message.args.create_config())
        except Exception as error:
            if _is_users(error):
                self._send(wire.StartupFailed(str(error), is_users=True))
            else:
                logger.exception("the engine could not be built")
                self._send(wire.StartupFailed(_describe(error), is_users=False))
            return None
        # What exists now lives as long as the process: spare the collector its visits.
        gc.collect()
        gc.freeze()
        self._send(wire.Ready(core.limits, core.stats, time.monotonic() - begin))
        return core

    def _turn(self, core: Core) -> bool:
        """Take all pending messages, then run one step if there is work."""
        wait = 0.0
        if not core.has_work:
            wait = max(0.0, self._last_sent + HEARTBEAT_SECONDS - time.monotonic())
        for message in self._receive(wait):
            if not self._handle(core, message):
                return False
        if core.has_work:
            self._send(wire.Step(core.step()))
        elif time.monotonic() - self._last_sent >= HEARTBEAT_SECONDS:
            self._send(wire.Heartbeat(core.stats))
        return True

    def _handle(self, core: Core, message: wire.ToEngine) -> bool:
        match message:
            case wire.AddRequests():
                for request in message.requests():
                    try:
                        core.add_request(request)
                    except RequestRefusedError as error:
                        self._send(wire.RequestRefused(request.id, str(error), error.param))
            case wire.Abort(ids):
                outputs = core.abort(ids)
                self._send(wire.Step(StepReport(outputs=outputs, stats=core.stats)))
            case wire.Shutdown():
                return False
            case wire.Start():
                raise TypeError("the engine is started already")
        return True

    def _receive(self, wait_seconds: float) -> Iterator[wire.ToEngine]:
        # Rounded up: a wait cut to zero would spin.
        if wait_seconds and not self._requests.poll(int(wait_seconds * 1000) + 1):
            return
        while True:
            try:
                data = self._requests.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield wire.decode_to_engine(data)

    def _send(self, message: wire.FromEngine) -> None:
        self._reports.send(wire.encode(message))
        self._last_sent = time.monotonic()


def _is_users(error: Exception) -> bool:
    """Whether the user's options, checkpoint or machine are at fault, and the message says how."""
    from atom.kv_cache.base import KVCacheMemoryError
    from atom.model_loader.errors import WeightError
    from atom.model_ops.registry import OpUnavailableError

    return isinstance(error, (ConfigError, WeightError, KVCacheMemoryError, OpUnavailableError))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _exit_with_parent() -> None:
    """End at once when standard input closes: only the frontend holds its other end."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the engine for a server; not for users.")
    parser.add_argument("--socket-dir", type=Path, required=True, help="where the sockets lie")
    socket_dir = parser.parse_args().socket_dir
    # Terminals and service managers signal every process of a group, but the frontend drains
    # first and then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s [engine] %(name)s: %(message)s")
    threading.Thread(target=_exit_with_parent, daemon=True).start()

    context = zmq.Context()
    requests, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (requests, reports):
        socket.set_hwm(0)
        socket.linger = _LINGER_MS
    requests.bind(wire.requests_address(socket_dir))
    reports.connect(wire.reports_address(socket_dir))
    # Imported only now, with the signals and the parent seen to: it takes seconds.
    from atom.model_engine.engine_core import EngineCore

    status = EngineLoop(requests, reports, EngineCore).run()
    context.destroy(_LINGER_MS)
    return status


if __name__ == "__main__":
    sys.exit(main())
