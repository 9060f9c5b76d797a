"""The server as a Ray Serve application.

serve run atom.entrypoints.ray_serve:build_app model=MODEL max_replicas=4
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack
from typing import Any

from ray import serve

from atom.config import EngineConfig
from atom.entrypoints.http.edge import REQUEST_ID_HEADER
from atom.entrypoints.ray_options import read_args
from atom.entrypoints.server.app import create_app
from atom.entrypoints.server.watchers import create_metrics, watching
from atom.entrypoints.server_options import ServerOptions
from atom.messages import EngineDeadError
from atom.model_engine.async_engine import AsyncEngine

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Requests that Serve gives a replica at a time, in batches; the others wait at the proxies.
_MOST_BATCHES = 2


class OpenAIServer:
    """A deployment replica: an engine, and the application around it."""

    # Ray Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self, config: EngineConfig, options: ServerOptions
    ) -> None:
        logging.getLogger("atom").setLevel(options.log_level.upper())
        metrics = create_metrics(options)
        self._watching = AsyncExitStack()
        watchers = watching(options, config.model.model, metrics)
        observer = await self._watching.enter_async_context(watchers)
        self._engine = await AsyncEngine.start(
            config, admission=options.admission, observer=observer
        )
        self.routes = create_app(self._engine, options, metrics)

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica of which this raises."""
        if (trouble := self._engine.trouble) is not None:
            raise EngineDeadError(trouble)

    async def close(self) -> None:
        """End the engine; by then Ray Serve has drained the replica."""
        await self._engine.shutdown(0)
        await self._watching.aclose()


class Ingress:
    """The ASGI application that Ray Serve calls: that of the replica it runs in."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await _replica().routes(scope, receive, _without_request_id(send))

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await _replica().close()
        await send({"type": "lifespan.shutdown.complete"})


def _without_request_id(send: Send) -> Send:
    """Ray Serve adds that header itself, from the same request."""

    async def pass_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = REQUEST_ID_HEADER.lower().encode()
            headers = [pair for pair in message["headers"] if pair[0].lower() != own]
            message = {**message, "headers": headers}
        await send(message)

    return pass_on


def _replica() -> OpenAIServer:
    server: OpenAIServer = serve.get_replica_context().servable_object
    return server


def build_app(args: dict[str, Any]) -> serve.Application:
    """The application of one deployment, `OpenAIServer`.

    Args:
        args: the server's flags by name, with underscores, and those of `ScalingOptions`.

    Raises:
        ConfigError, OptionError: for an unknown option, or a value that cannot be.
    """
    options = read_args(args)
    scaling = options.scaling
    deployment = serve.deployment(
        serve.ingress(Ingress())(OpenAIServer),
        name=OpenAIServer.__name__,
        max_ongoing_requests=_MOST_BATCHES * options.batch_size,
        graceful_shutdown_timeout_s=options.server.drain_seconds,
        ray_actor_options={"num_gpus": options.num_gpus},
        autoscaling_config={
            "min_replicas": scaling.min_replicas,
            "max_replicas": scaling.max_replicas,
            "target_ongoing_requests": scaling.target_ongoing_requests or options.batch_size,
        },
    )
    return deployment.bind(options.config, options.server)
