"""Prometheus metrics of a model that embeds or scores, under the names that others have."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atom.pooling.engine import PoolingEngine, PoolingStats


class _PoolingCollector(Collector):
    """Read when scraped."""

    def __init__(self, engine: PoolingEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats: PoolingStats = self._engine.stats
        yield GaugeMetricFamily(
            "atom:num_requests_running", "Inputs in the batch.", stats.num_running
        )
        yield GaugeMetricFamily("atom:num_requests_waiting", "Inputs that wait.", stats.num_waiting)
        yield CounterMetricFamily("atom:steps", "Batches computed.", stats.num_batches)
        yield CounterMetricFamily(
            "atom:prompt_tokens", "Tokens computed, padding apart.", stats.num_tokens
        )


def expose(engine: PoolingEngine) -> tuple[bytes, str]:
    """The metrics now, and their content type."""
    registry = CollectorRegistry()
    registry.register(_PoolingCollector(engine))
    return generate_latest(registry), CONTENT_TYPE_LATEST
