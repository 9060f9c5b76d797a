"""The board, the alerts and the autoscaler ask for metrics that the server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from atom.entrypoints.http.metrics import ServerMetrics
from atom.messages import EngineStats
from atom.model_engine.replicas.replica_set import ReplicaHealth
from atom.stats import ExpectedAcceptance, SpecDecodeCounter

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "atom"
ALERTS = CHART / "files" / "alerts.yaml"
BOARD: dict[str, Any] = json.loads((CHART / "files" / "board.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
# Labels that Prometheus adds.
ADDED = {"job", "instance", "namespace", "pod"}

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def queries() -> Iterator[tuple[str, str]]:
    """(where it stands, PromQL)."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    for variable in BOARD["templating"]["list"][1:]:
        query = variable["query"]["query"].removeprefix("label_values(").rpartition(",")[0]
        yield f"variable {variable['name']}", query
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    template = (CHART / "templates" / "autoscaling.yaml").read_text(encoding="utf-8")
    query = template.partition("query: >-")[2].partition("threshold:")[0]
    yield "autoscaling", re.sub(r"\{\{.*?\}\}", "x", query)


every_query = pytest.mark.parametrize(
    ("where", "query"), list(queries()), ids=lambda value: value[:30]
)


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Every series of a server with replicas and drafts, and its labels."""
    counter = SpecDecodeCounter(3)
    counter.count(3, 2, "eagle3")
    card = ExpectedAcceptance(
        source="eagle3", tokens_per_forward=2.4, num_speculative_tokens=3, data="GSM8K"
    )
    stats = EngineStats(
        kv_cache_dtype="bfloat16", spec_decode=counter.snapshot(), expected_acceptance=card
    )
    health = [ReplicaHealth(None, 0)] * 2
    text = ServerMetrics().expose(stats, stats, health=health)[0].decode()
    series = {"up": set(ADDED)}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, set(ADDED)).update(sample.labels)
    return series


@every_query
def test_queries_name_what_is_exposed(where: str, query: str, exposed: dict[str, set[str]]) -> None:
    asked = re.findall(r"(?<![\w:])(atom:\w+|up)(?:\{([^}]*)\})?", query)
    assert asked, where
    labels: set[str] = set()
    for name, matchers in asked:
        assert name in exposed, f"{where} asks for {name}"
        known = {matcher.split("=")[0].strip(" !") for matcher in matchers.split(",") if matcher}
        assert known <= exposed[name], f"{where}: {name} has no {known - exposed[name]}"
        labels |= exposed[name]
    for grouped in re.findall(r"(?:by|on|without|ignoring) \(([^)]*)\)", query):
        names = {name.strip() for name in grouped.split(",")}
        assert names <= labels, f"{where} groups by {names - labels}"


@every_query
def test_only_counters_have_a_rate(where: str, query: str) -> None:
    for name, bracket in re.findall(r"(atom:\w+)(?:\{[^}]*\})?(\[?)", query):
        assert bool(bracket) == name.endswith(("_total", "_bucket")), f"{where}: {name}"


def test_panels_have_places_of_their_own() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    cells = [
        (x, y)
        for panel in BOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_say_what_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description"}


@needs_promtool
def test_prometheus_reads_the_queries_of_the_board(tmp_path: Path) -> None:
    rules = [
        {"record": f"query_{n}", "expr": query.replace("$__rate_interval", "1m")}
        for n, (_, query) in enumerate(queries())
    ]
    path = tmp_path / "board.yaml"
    path.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}), encoding="utf-8")
    subprocess.run([str(PROMTOOL), "check", "rules", str(path)], check=True)


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    tests = Path(__file__).with_name("alerts_test.yaml")
    subprocess.run([str(PROMTOOL), "test", "rules", str(tests)], check=True)


@needs_promtool
def test_prometheus_reads_its_configuration() -> None:
    path = CHART.parents[1] / "compose" / "prometheus.yaml"
    subprocess.run([str(PROMTOOL), "check", "config", "--syntax-only", str(path)], check=True)
