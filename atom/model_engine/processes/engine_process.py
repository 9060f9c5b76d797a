"""The engine process: `python -m atom.model_engine.processes.engine_process`.

The frontend starts it and talks to it over two ZMQ sockets. It exits when its standard input
closes, which means that the frontend is gone.
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

from atom import logs, torch_start
from atom.config import EngineConfig
from atom.messages import (
    EngineDeadError,
    EngineLimits,
    EngineRequest,
    EngineStats,
    ModelFacts,
    RequestRefusedError,
    SequenceOutput,
    StepReport,
)
from atom.model_engine.processes import wire
from atom.model_engine.processes.causes import is_users
from atom.model_engine.processes.heartbeat import Heart
from atom.model_engine.processes.memory import give_back_memory
from atom.model_loader import ahead

logger = logging.getLogger(__name__)

# How long to wait at exit for the last messages to be sent.
_LINGER_MS = 2000
# An engine that had nothing to do for so long is likely to have nothing to do for longer.
_IDLE_MS = 1000


class Core(Protocol):
    """The part of `EngineCore` that the loop uses."""

    limits: EngineLimits

    @property
    def has_work(self) -> bool: ...
    @property
    def max_idle_ms(self) -> int | None: ...
    @property
    def num_step_tokens(self) -> int: ...
    @property
    def stats(self) -> EngineStats: ...
    def add_request(self, request: EngineRequest) -> None: ...
    def abort(self, ids: Iterable[str]) -> list[SequenceOutput]: ...
    def step(self) -> StepReport: ...
    def shutdown(self) -> None: ...


# Called with what is to hear of the model.
CreateCore = Callable[[EngineConfig, Callable[[ModelFacts], None]], Core]


class EngineLoop:
    """Handles messages between steps and reports after each step.

    Args:
        create_core: builds the engine, and says what its model is before it takes long.
        heartbeats: a second socket to the address of `reports`, for the heartbeat thread.
        tidy: called once whenever there was no work for a second.
    """

    def __init__(
        self,
        requests: zmq.Socket[bytes],
        reports: zmq.Socket[bytes],
        heartbeats: zmq.Socket[bytes],
        create_core: CreateCore,
        tidy: Callable[[], object] = give_back_memory,
    ) -> None:
        self._requests = requests
        self._reports = reports
        self._heartbeats = heartbeats
        self._create_core = create_core
        self._tidy = tidy

    def run(self) -> int:
        """Serve until shut down; returns the exit status of the process."""
        core = self._start()
        if core is None:
            return 1
        heart = Heart(self._heartbeats, lambda: core.num_step_tokens)
        try:
            while self._turn(core, heart):
                pass
            core.shutdown()
        except EngineDeadError as error:
            logger.exception("the engine failed")
            self._send(wire.EngineFailed(str(error)))
            return 1
        except Exception as error:
            logger.exception("the engine failed")
            self._send(wire.EngineFailed(_describe(error)))
            return 1
        finally:
            heart.stop()
        return 0

    def _start(self) -> Core | None:
        message = wire.decode_to_engine(self._requests.recv())
        if not isinstance(message, wire.Start):
            raise TypeError(f"the first message must be Start, got {type(message).__name__}")
        logging.getLogger("atom").setLevel(message.log_level)
        logs.use_format(message.log_format)
        begin = time.monotonic()
        try:
            core = self._create_core(message.config, self._found)
        except Exception as error:
            if is_users(error):
                self._send(wire.StartupFailed(str(error), is_users=True))
            else:
                logger.exception("the engine could not be built")
                self._send(wire.StartupFailed(_describe(error), is_users=False))
            return None
        # These objects live as long as the process; exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        gc.enable()
        self._send(wire.Ready(core.limits, core.stats, time.monotonic() - begin))
        return core

    def _found(self, model: ModelFacts) -> None:
        self._send(wire.Found(model))

    def _turn(self, core: Core, heart: Heart) -> bool:
        """Handle all pending messages, waiting for one if idle; then run one step.

        Without work, a step that other engines wait for is not reported.
        """
        if not core.has_work:
            self._rest(core)
        for message in self._receive():
            if not self._handle(core, message):
                return False
        if core.has_work:
            begin = time.monotonic()
            with heart.step():
                report = core.step()
            report.seconds, report.num_tokens = time.monotonic() - begin, core.num_step_tokens
            report.stats = core.stats
            self._send(wire.Step(report))
        elif core.max_idle_ms is not None:
            core.step()  # of other engines, whose hearts tell how long it takes
        return True

    def _rest(self, core: Core) -> None:
        """Wait for a message, or until an empty step is due."""
        if core.max_idle_ms is None and not self._requests.poll(_IDLE_MS):
            self._tidy()
        self._requests.poll(core.max_idle_ms)

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

    def _receive(self) -> Iterator[wire.ToEngine]:
        while True:
            try:
                data = self._requests.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield wire.decode_to_engine(data)

    def _send(self, message: wire.FromEngine) -> None:
        self._reports.send(wire.encode(message))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _exit_with_parent() -> None:
    """Exit when standard input closes: only the frontend holds its other end."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the engine for a server; not for users.")
    parser.add_argument("--socket-dir", type=Path, required=True, help="where the sockets lie")
    parser.add_argument("--name", default="engine", help="what the log calls this process")
    parser.add_argument("--cpus", type=int, nargs="+", help="processors to keep to")
    parser.add_argument(
        "--ahead", type=Path, nargs="*", default=[], help="files that are likely to be asked for"
    )
    args = parser.parse_args()
    # Ctrl-C and service managers signal the whole process group, but the frontend drains its
    # requests first and then ends this process itself. It began with SIGINT held back.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    socket_dir: Path = args.socket_dir
    if args.cpus is not None:  # before torch counts them
        os.sched_setaffinity(0, args.cpus)
    # What a start makes stays; looking for garbage in it would take a tenth of the time.
    gc.disable()
    ahead.begin_files(args.ahead)
    torch_start.begin()
    logs.set_up(process=args.name)
    threading.Thread(target=_exit_with_parent, daemon=True).start()

    context = zmq.Context()
    requests = context.socket(zmq.PULL)
    reports, heartbeats = context.socket(zmq.PUSH), context.socket(zmq.PUSH)
    for socket in (requests, reports, heartbeats):
        socket.set_hwm(0)
        socket.linger = _LINGER_MS
    requests.bind(wire.requests_address(socket_dir))
    # Imported after signals and stdin are handled, since it takes seconds.
    from atom.model_engine.engine_core import EngineCore
    from atom.model_loader.source import resolve_model

    def create_core(config: EngineConfig, found: Callable[[ModelFacts], None]) -> EngineCore:
        source = resolve_model(config.model)
        found(source.facts)
        return EngineCore(config, source=source)

    # With the first message the other end is there: who connects before tries again now and then,
    # and the folder of the sockets may be gone by then.
    requests.poll()
    for socket in (reports, heartbeats):
        socket.connect(wire.reports_address(socket_dir))
    status = EngineLoop(requests, reports, heartbeats, create_core).run()
    context.destroy(_LINGER_MS)
    return status


if __name__ == "__main__":
    sys.exit(main())
