"""What watches the requests of a server, as its options say: metrics, the log, traces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atom.entrypoints.http.metrics import ServerMetrics
from atom.entrypoints.server.request_log import RequestLog
from atom.entrypoints.server.traces import RequestTracer
from atom.entrypoints.server_options import ServerOptions
from atom.text.observer import EngineObserver, Observers


def create_metrics(options: ServerOptions) -> ServerMetrics:
    names = [each.name for each in options.named_api_keys]
    return ServerMetrics(names if options.metrics_per_api_key else ())


@asynccontextmanager
async def watching(
    options: ServerOptions, model: str | None, metrics: ServerMetrics
) -> AsyncIterator[EngineObserver]:
    """All that the options ask for; at the end spans that wait are sent.

    Args:
        model: the engine's name of it, where the options have none.
    """
    watchers: list[EngineObserver] = [metrics]
    if options.enable_log_requests:
        watchers.append(RequestLog())
    if options.otlp_traces_endpoint is None:
        yield Observers(watchers)
        return
    name = options.served_model_names[0] if options.served_model_names else model
    tracer = RequestTracer.to(options.otlp_traces_endpoint, name)
    try:
        yield Observers([*watchers, tracer])
    finally:
        await tracer.close()
