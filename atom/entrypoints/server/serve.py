"""The server's life: start the engine, listen, drain on a signal, end when the engine does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import signal
import socket
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import uvicorn
from fastapi import FastAPI

from atom.config import EngineConfig
from atom.entrypoints.http.connection import BoundedProtocol
from atom.entrypoints.http.metrics import ServerMetrics
from atom.entrypoints.http.sse import cancel
from atom.entrypoints.server.app import create_app
from atom.entrypoints.server.banner import banner, pooling_banner
from atom.entrypoints.server.stats_log import log_stats
from atom.entrypoints.server.watchers import create_metrics, watching
from atom.entrypoints.server_options import OptionError, ServerOptions
from atom.model_engine.async_engine import AsyncEngine
from atom.model_engine.processes.spawn import SpawnedEngines
from atom.pooling.source import PoolingSource, pooling_source
from atom.text.observer import EngineObserver

if TYPE_CHECKING:
    from atom.pooling.async_engine import AsyncPoolingEngine

logger = logging.getLogger(__name__)

AnyEngine: TypeAlias = "AsyncEngine | AsyncPoolingEngine"

# After the engine's death the server lives on that long to say so: requests in flight get
# their errors and /health answers 503.
DEAD_LINGER_SECONDS = 3.0

# For the last bytes of answers whose generation has been ended, while the engine ends too.
FLUSH_SECONDS = 1.5

BACKLOG = 2048

# Longer than the idle timeouts of common clients and proxies, which should close first.
KEEP_ALIVE_SECONDS = 75


async def serve(
    engine_config: EngineConfig,
    options: ServerOptions,
    sock: socket.socket,
    model: PoolingSource | SpawnedEngines | None,
) -> int:
    """Run until a signal or the engine's death; returns the process's exit code.

    Args:
        model: what embeds or scores, or the processes of what generates; None where nobody has
            looked yet.
    """
    metrics = create_metrics(options)
    async with watching(options, engine_config.model.model, metrics) as observer:
        return await _serve(engine_config, options, sock, model, metrics, observer)


async def _serve(
    engine_config: EngineConfig,
    options: ServerOptions,
    sock: socket.socket,
    model: PoolingSource | SpawnedEngines | None,
    metrics: ServerMetrics,
    observer: EngineObserver,
) -> int:
    signals = _Signals()
    starting = asyncio.create_task(_start(engine_config, options, model, observer))
    if not await signals.wait_unless_done(starting):
        logger.info("stopped while loading the model")
        await cancel(starting)
        return 0
    engine = starting.result()
    try:
        app = _create_app(engine, options, metrics)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,  # `EdgeMiddleware` has one, without the query
            lifespan="off",
            ws="none",
            http=BoundedProtocol,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if options.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        )
        return await _listen(_Server(config), engine, options, sock, signals)
    finally:
        await engine.shutdown(0)


async def _start(
    config: EngineConfig,
    options: ServerOptions,
    model: PoolingSource | SpawnedEngines | None,
    observer: EngineObserver,
) -> AnyEngine:
    if model is None:
        model = await asyncio.to_thread(pooling_source, config)
    if isinstance(model, PoolingSource):
        # What computes here imports torch, which a server of what generates does without.
        from atom.entrypoints.server.pooling_app import refuse_generation_options
        from atom.pooling.async_engine import AsyncPoolingEngine

        refuse_generation_options(options, model.name)
        return await AsyncPoolingEngine.start(config, model, admission=options.admission)
    return await AsyncEngine.start(
        config, admission=options.admission, observer=observer, spawned=model
    )


def _create_app(engine: AnyEngine, options: ServerOptions, metrics: ServerMetrics) -> FastAPI:
    if isinstance(engine, AsyncEngine):
        return create_app(engine, options, metrics)
    from atom.entrypoints.server.pooling_app import create_pooling_app

    return create_pooling_app(engine, options)


def _banner(url: str, options: ServerOptions, engine: AnyEngine) -> str:
    if isinstance(engine, AsyncEngine):
        return banner(url, options, engine)
    return pooling_banner(url, options, engine.engine)


async def _listen(
    server: _Server,
    engine: AnyEngine,
    options: ServerOptions,
    sock: socket.socket,
    signals: _Signals,
) -> int:
    url = _url(sock, is_encrypted=options.ssl_certfile is not None)
    is_open = _is_open(sock)  # uvicorn closes the socket
    try:
        sock.listen(BACKLOG)  # not left to the event loop: uvloop keeps a failure to itself
    except OSError as error:
        raise OptionError(f"cannot listen on {url}: {error}") from error
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    dead = asyncio.create_task(engine.wait_dead())
    watching = [asyncio.create_task(log_stats(engine))] if isinstance(engine, AsyncEngine) else []
    try:
        while not (server.started or serving.done()):
            await asyncio.sleep(0.01)
        # What is here now stays: later searches for garbage leave it out.
        gc.collect()
        gc.freeze()
        if not serving.done():
            logger.info("%s", _banner(url, options, engine))
            logger.info("Ready: %s serves %s", url, engine.model_name)
            if is_open and not options.api_keys:
                logger.warning(
                    "whoever reaches %s may use it: give --api-key, or set $ATOM_API_KEY", url
                )
        await signals.wait_unless_done(serving, dead)
        died = dead.done()
        if died:
            logger.critical("the engine died: %s", dead.result())
            await asyncio.sleep(DEAD_LINGER_SECONDS)
        await _drain(server, serving, engine, 0 if died else options.drain_seconds, signals)
        return 1 if died else 0
    finally:
        await cancel(serving, dead, *watching)


async def _drain(
    server: _Server,
    serving: asyncio.Task[None],
    engine: AnyEngine,
    seconds: float,
    signals: _Signals,
) -> None:
    """Stop listening, let requests in flight end, then end those that are left."""
    server.should_exit = True
    if not serving.done():
        logger.info("stopping; requests in flight have %g s", seconds)
    signals.again()
    await signals.wait_unless_done(serving, timeout=seconds)
    ending = asyncio.create_task(engine.shutdown(0))
    await asyncio.wait({serving, ending}, timeout=FLUSH_SECONDS)
    if serving.done():
        serving.result()


def _is_open(sock: socket.socket) -> bool:
    """Whether other machines may reach it."""
    if sock.family == socket.AF_UNIX:
        return False
    return not ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def _url(sock: socket.socket, *, is_encrypted: bool) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if is_encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain, and decide the exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Signals:
    """SIGTERM and SIGINT as an event."""

    def __init__(self) -> None:
        self._received = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received.set)

    def again(self) -> None:
        """Forget the last signal: the next one means that somebody is in a hurry."""
        self._received.clear()

    async def wait_unless_done(
        self, *tasks: asyncio.Task[object], timeout: float | None = None
    ) -> bool:
        """Wait for a signal, a task's end or the timeout; true when a task has ended."""
        received = asyncio.create_task(self._received.wait())
        try:
            await asyncio.wait(
                {received, *tasks}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            await cancel(received)
        return any(task.done() for task in tasks)
