"""A span for each prompt that was answered, sent to an OpenTelemetry collector.

The names of attributes are those of OpenTelemetry's conventions for generative models, and where
they have none, of other engines.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from atom.text.observer import FinishedRequest, NullObserver

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
# For spans that have not been sent when the server ends.
_FLUSH_SECONDS = 3.0


class RequestTracer(NullObserver):
    """Makes the spans; a thread sends them.

    Args:
        model: what answers call it; None where nobody gave it a name.
        exporter: what sends them.
    """

    def __init__(self, model: str | None, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        # The environment's service name goes before this one.
        resource = Resource({"service.name": "atom"}).merge(Resource.create())
        self._provider: TracerProvider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("atom")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, model: str | None) -> RequestTracer:
        """Send spans to a collector's URL by HTTP, as protobuf."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(model, OTLPSpanExporter(endpoint=endpoint))

    def on_request_finished(self, request: FinishedRequest) -> None:
        from opentelemetry.trace import SpanKind

        times, parent = request.metrics, request.caller.trace_parent
        context = None if parent is None else self._propagator.extract({"traceparent": parent})
        span = self._tracer.start_span(
            SPAN_NAME,
            context=context,
            kind=SpanKind.SERVER,
            attributes={k: v for k, v in self._attributes(request).items() if v is not None},
            start_time=_wall_ns(times.arrival_time),
        )
        span.end(_wall_ns(times.finished_time or time.monotonic()))

    async def close(self) -> None:
        """Send what is left, if that does not take long."""
        ending = asyncio.to_thread(self._provider.shutdown)
        try:
            await asyncio.wait_for(ending, _FLUSH_SECONDS)
        except asyncio.TimeoutError:
            return

    def _attributes(self, request: FinishedRequest) -> dict[str, Any]:
        params, times = request.params, request.metrics
        latency = "gen_ai.latency"
        return {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": request.caller.request_id or None,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.n": params.n,
            "gen_ai.response.finish_reasons": [request.finish_reason],
            "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": request.num_output_tokens,
            f"{latency}.time_in_queue": _between(times.arrival_time, times.first_scheduled_time),
            f"{latency}.time_to_first_token": times.time_to_first_token,
            f"{latency}.e2e": _between(times.arrival_time, times.finished_time),
            "atom.api_key": request.caller.key or None,
            "atom.cached_tokens": request.num_cached_tokens,
            "atom.preemptions": times.num_preemptions,
        }


def _wall_ns(monotonic: float) -> int:
    """Nanoseconds since 1970 of a time on the monotonic clock."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)


def _between(start: float, end: float | None) -> float | None:
    return None if end is None else end - start
