"""The frontend's handle on the engine process: sockets, start and shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TypeVar

import zmq

from atom import logs
from atom.config import ConfigError, EngineConfig
from atom.messages import EngineDeadError, ModelFacts
from atom.model_engine.processes import wire
from atom.model_engine.processes.spawn import EngineProcess

# After a Shutdown message: time to finish the step in progress, then time to exit.
_SHUTDOWN_SECONDS = 1.0
_EXIT_SECONDS = 0.5
# The last messages of a process may arrive after its exit is noticed.
_LAST_WORDS_SECONDS = 0.1


_T = TypeVar("_T", wire.Found, wire.Ready)


class EngineClient:
    """Connects to an engine process, which is its own from then on; needs a running event loop."""

    def __init__(self, process: EngineProcess, config: EngineConfig) -> None:
        self._config = config
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._wakeup = asyncio.Event()
        self._exited = asyncio.Event()
        # Messages of the start that came with others.
        self._first: deque[wire.FromEngine] = deque()
        self._context = zmq.Context()
        # The connecting side queues messages, so they can be sent before the engine binds.
        self._requests = self._create_socket(zmq.PUSH)
        self._requests.connect(wire.requests_address(process.socket_dir))
        self._reports = self._create_socket(zmq.PULL)
        self._reports.bind(wire.reports_address(process.socket_dir))
        self._loop.add_reader(self._reports.fileno(), self._on_readable)
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._exited.is_set()

    @property
    def is_open(self) -> bool:
        """Whether the sockets are open, so that `stop` or `kill` must still be called."""
        return not self._reports.closed

    def send(self, message: wire.ToEngine) -> None:
        """Send a message without blocking; it is dropped if the engine is dead.

        Raises:
            UnicodeEncodeError: when a string in it is not valid Unicode.
        """
        data = wire.encode(message)
        if self.is_alive:
            self._requests.send(data, zmq.NOBLOCK)

    async def receive(self) -> list[wire.FromEngine]:
        """Wait for a message, then return all that have arrived.

        Raises:
            EngineDeadError: when the process has ended and all its messages were received.
        """
        while True:
            self._wakeup.clear()
            if messages := self._drain():
                return messages
            if self._exited.is_set():
                await asyncio.sleep(_LAST_WORDS_SECONDS)
                if messages := self._drain():
                    return messages
                raise EngineDeadError(f"the engine process {self._describe_exit()}")
            await self._wakeup.wait()

    async def start(self) -> ModelFacts:
        """Let the engine be built, and wait until it has found its model.

        Raises:
            ConfigError: with the engine's message when an option or the checkpoint is wrong.
            EngineDeadError: when it failed otherwise.
        """
        self.send(wire.Start(self._config, *logs.settings()))
        return (await self._next(wire.Found)).model

    async def built(self) -> wire.Ready:
        """Wait until the engine that was started is built.

        Raises:
            ConfigError, EngineDeadError: as `start`.
        """
        ready = await self._next(wire.Ready)
        self._process.remove_sockets()  # nothing is left behind from now on
        return ready

    async def _next(self, kind: type[_T]) -> _T:
        if not self._first:
            self._first.extend(await self.receive())
        message = self._first.popleft()
        if isinstance(message, kind):
            return message
        match message:
            case wire.StartupFailed(text, is_users=True):
                raise ConfigError(text)
            case wire.StartupFailed(text):
                raise EngineDeadError(f"the engine could not be built: {text}")
        raise TypeError(f"expected {kind.__name__}, and the engine said {type(message).__name__}")

    async def stop(self) -> None:
        """End the process and release everything: send Shutdown, then close stdin, then kill."""
        self.send(wire.Shutdown())
        if not await self._has_exited(_SHUTDOWN_SECONDS):
            self._process.close_pipe()
            if not await self._has_exited(_EXIT_SECONDS):
                self._process.kill()
                await self._exited.wait()
        self._close()

    async def kill(self) -> None:
        """Kill the process and release everything."""
        self._process.kill()
        await self._exited.wait()
        self._close()

    async def _has_exited(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._exited.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    def _create_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        return socket

    def _on_readable(self) -> None:
        # Reading the events resets the descriptor, which would otherwise stay readable and make the
        # event loop spin while nobody receives.
        self._reports.getsockopt(zmq.EVENTS)
        self._wakeup.set()

    def _drain(self) -> list[wire.FromEngine]:
        # All of them: the descriptor is edge-triggered. Asking costs less than an exception.
        messages: list[wire.FromEngine] = []
        while int(self._reports.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            messages.append(wire.decode_from_engine(self._reports.recv(zmq.NOBLOCK)))
        return messages

    def _watch(self) -> None:
        self._process.wait()
        try:
            self._loop.call_soon_threadsafe(self._on_exit)
        except RuntimeError:  # the event loop was closed before the engine ended
            return

    def _on_exit(self) -> None:
        self._exited.set()
        self._wakeup.set()

    def _describe_exit(self) -> str:
        status = self._process.returncode
        if status >= 0:
            return f"ended with status {status}; its log says why"
        hint = ", perhaps for lack of memory" if status == -9 else ""
        return f"was killed by signal {-status}{hint}"

    def _close(self) -> None:
        self._process.close_pipe()
        if self.is_open:
            self._loop.remove_reader(self._reports.fileno())
            for socket in (self._requests, self._reports):
                socket.close(linger=0)
            # The library rarely waits for ever here, so nobody waits for it.
            threading.Thread(target=self._context.term, daemon=True).start()
        self._process.remove_sockets()
