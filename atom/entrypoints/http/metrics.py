"""Prometheus metrics of one server, all named `atom:...`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atom.entrypoints.engine_metrics import engine_metrics
from atom.messages import EngineStats
from atom.model_engine.replicas.replica_set import ReplicaHealth
from atom.stats import ExpectedAcceptance, SpecDecodeStats
from atom.text.observer import FinishedRequest

FINISH_REASONS = ("stop", "length", "abort")

# Seconds.
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_REQUEST_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0),
)


class ServerMetrics:
    """Watches requests as an `EngineObserver`, and joins the engine's own counts when read.

    Every instance has a registry of its own.

    Args:
        key_names: those of API keys whose requests are counted apart, too.
    """

    def __init__(self, key_names: Sequence[str] = ()) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._finished = Counter(
            "atom:requests_finished",
            "Requests that ended, by reason.",
            ["reason"],
            registry=self._registry,
        )
        for reason in FINISH_REASONS:
            self._finished.labels(reason)  # present from the start, at zero
        self._by_key = _KeyCounters(self._registry, key_names) if key_names else None
        # Of requests, where the engine counts sequences.
        self._prompt_tokens = Counter(
            "atom:prompt_tokens",
            "Prompt tokens of requests whose first token came; once, however many answers.",
            registry=self._registry,
        )
        self._time_to_first_token = self._histogram(
            "time_to_first_token", "From arrival to the first token.", _REQUEST_BUCKETS
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency",
            "Between tokens of a sequence; tokens of one step share its time.",
            _TOKEN_BUCKETS,
        )
        self._latency = self._histogram(
            "e2e_request_latency", "From arrival to the end.", _REQUEST_BUCKETS
        )
        self._queue_time = self._histogram(
            "request_queue_time", "From arrival to the first scheduling.", _REQUEST_BUCKETS
        )

    def expose(
        self, *stats: EngineStats, health: Sequence[ReplicaHealth] = ()
    ) -> tuple[bytes, str]:
        """The metrics with the latest state of each replica, and their content type."""
        self._engine.stats, self._engine.health = stats, health
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        self._time_to_first_token.observe(seconds)

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        if seconds is None:
            return
        for _ in range(num_tokens):
            self._inter_token_latency.observe(seconds / num_tokens)

    def on_request_finished(self, request: FinishedRequest) -> None:
        self._finished.labels(request.finish_reason).inc()
        metrics = request.metrics
        arrived = metrics.arrival_time
        if metrics.finished_time is not None:
            self._latency.observe(metrics.finished_time - arrived)
        if metrics.first_scheduled_time is not None:
            self._queue_time.observe(metrics.first_scheduled_time - arrived)
        if self._by_key is not None:
            self._by_key.add(request)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"atom:{name}_seconds", text, buckets=buckets, registry=self._registry)


class _KeyCounters:
    """What ended, by the name of the API key."""

    def __init__(self, registry: CollectorRegistry, names: Sequence[str]) -> None:
        self._requests = Counter(
            "atom:requests_finished_by_api_key",
            "Requests that ended, by the name of the API key.",
            ["api_key"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "atom:prompt_tokens_by_api_key",
            "Prompt tokens of requests that ended after their first token.",
            ["api_key"],
            registry=registry,
        )
        self._generation_tokens = Counter(
            "atom:generation_tokens_by_api_key",
            "Tokens generated for requests that ended.",
            ["api_key"],
            registry=registry,
        )
        for name in names:
            for counter in (self._requests, self._prompt_tokens, self._generation_tokens):
                counter.labels(name)  # present from the start, at zero

    def add(self, request: FinishedRequest) -> None:
        name = request.caller.key
        self._requests.labels(name).inc()
        if request.metrics.first_token_time is not None:
            self._prompt_tokens.labels(name).inc(request.num_prompt_tokens)
        self._generation_tokens.labels(name).inc(request.num_output_tokens)


class _EngineCollector(Collector):
    """The engine's `EngineStats` as metrics; read when scraped, so steps cost nothing.

    Those of several replicas are told apart by a label; health always has it.
    """

    def __init__(self) -> None:
        self.stats: Sequence[EngineStats] = (EngineStats(),)
        self.health: Sequence[ReplicaHealth] = ()

    def collect(self) -> Iterator[Metric]:
        if len(self.stats) == 1:
            yield from _engine_families(self.stats[0])
        else:
            yield from self._labelled()
        yield from _health_families(self.health)

    def _labelled(self) -> Iterable[Metric]:
        labelled: dict[str, Metric] = {}
        for index, stats in enumerate(self.stats):
            for family in _engine_families(stats):
                family.samples = [
                    sample._replace(labels={"replica": str(index), **sample.labels})
                    for sample in family.samples
                ]
                if (known := labelled.setdefault(family.name, family)) is not family:
                    known.samples += family.samples
        return labelled.values()


def _engine_families(stats: EngineStats) -> Iterator[Metric]:
    for metric in engine_metrics(stats):
        family = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
        yield family(metric.name, metric.description, value=metric.value)
    yield _kv_cache_info(stats)
    if stats.expected_acceptance is not None:
        yield _expected_acceptance(stats.expected_acceptance)
    if stats.spec_decode is not None:
        yield from _spec_decode_metrics(stats.spec_decode)


def _health_families(health: Sequence[ReplicaHealth]) -> Iterator[Metric]:
    healthy = GaugeMetricFamily(
        "atom:replica_healthy", "Whether the replica is expected to answer.", labels=["replica"]
    )
    restarts = CounterMetricFamily(
        "atom:replica_restarts", "Times that the replica was restarted.", labels=["replica"]
    )
    for index, replica in enumerate(health):
        healthy.add_metric([str(index)], replica.problem is None)
        restarts.add_metric([str(index)], replica.num_restarts)
    yield from (healthy, restarts)


def _kv_cache_info(stats: EngineStats) -> Metric:
    """What the KV blocks are, as labels of a 1."""
    labels = {"dtype": stats.kv_cache_dtype, "block_size": str(stats.block_size)}
    family = GaugeMetricFamily(
        "atom:kv_cache_info", "How KV blocks are stored, and their tokens.", labels=list(labels)
    )
    if stats.kv_cache_dtype:
        family.add_metric(list(labels.values()), 1)
    return family


def _expected_acceptance(expected: ExpectedAcceptance) -> Metric:
    labels = {
        "source": expected.source,
        "num_speculative_tokens": str(expected.num_speculative_tokens),
        "data": expected.data,
    }
    family = GaugeMetricFamily(
        "atom:spec_decode_expected_acceptance_length",
        "Tokens per verified step that the draft's card states.",
        labels=list(labels),
    )
    family.add_metric(list(labels.values()), expected.tokens_per_forward)
    return family


def _spec_decode_metrics(stats: SpecDecodeStats) -> Iterator[Metric]:
    """Counted only where drafts were verified: what has labels."""
    per_position = CounterMetricFamily(
        "atom:spec_decode_num_accepted_tokens_per_pos",
        "Drafts accepted, by their position in the step from 0.",
        labels=["position"],
    )
    for position, count in enumerate(stats.accepted_per_position):
        per_position.add_metric([str(position)], count)
    yield per_position
    yield from _by_source(stats.by_source)


def _by_source(by_source: Mapping[str, SpecDecodeStats]) -> Iterator[Metric]:
    """The same counts, told apart by who made the drafts."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    families = [
        CounterMetricFamily(
            f"atom:spec_decode_{name}_by_source",
            f"As spec_decode_{name}, by who made the drafts.",
            labels=["source"],
        )
        for name in names
    ]
    per_position = CounterMetricFamily(
        "atom:spec_decode_num_accepted_tokens_per_pos_by_source",
        "As spec_decode_num_accepted_tokens_per_pos, by who made the drafts.",
        labels=["source", "position"],
    )
    for source, stats in by_source.items():
        values = (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)
        for family, value in zip(families, values, strict=True):
            family.add_metric([source], value)
        for position, count in enumerate(stats.accepted_per_position):
            per_position.add_metric([source, str(position)], count)
    yield from (*families, per_position)
