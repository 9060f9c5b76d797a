"""The Helm chart: its values, its examples, and what Helm makes of them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from atom.entrypoints.openai_server import create_parser, read_options

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "atom"
TEMPLATES = "\n".join(
    path.read_text(encoding="utf-8") for path in sorted((CHART / "templates").iterdir())
)
VALUES_TEXT = (CHART / "values.yaml").read_text(encoding="utf-8")
VALUES: dict[str, Any] = yaml.safe_load(VALUES_TEXT)
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))

HELM = shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed")
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


def leaves(values: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The values with a place of their own in the schema, as dotted names."""
    for name, value in values.items():
        inner = schema["properties"][name]
        if "properties" in inner:
            yield from leaves(value, inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def check_known(values: dict[str, Any], schema: dict[str, Any], where: str = "") -> None:
    for name, value in values.items():
        assert name in schema["properties"], f"unknown value {where}{name}"
        if "properties" in schema["properties"][name]:
            check_known(value, schema["properties"][name], f"{where}{name}.")


def refuses_others(schema: dict[str, Any]) -> bool:
    parts = [part for part in schema["properties"].values() if "properties" in part]
    return schema["additionalProperties"] is False and all(map(refuses_others, parts))


def test_the_schema_knows_the_values_and_no_others() -> None:
    check_known(VALUES, SCHEMA)
    for name in SCHEMA["properties"]:
        assert name in VALUES or name == "global"
    assert refuses_others(SCHEMA)


def test_templates_use_the_values_and_no_others() -> None:
    used = set(re.findall(r"(?:\$values|\.Values)\.([\w.]+)", TEMPLATES))
    # Fields of a pod that are passed on, and what is passed on in parts.
    used |= set(re.findall(r'"(\w+)"', re.findall(r"range \$field := list (.*)", TEMPLATES)[0]))
    used = {"resources" if name.startswith("resources.") else name for name in used}
    assert used == set(leaves(VALUES, SCHEMA))


def test_values_are_documented() -> None:
    """Every block has comments, and every value that its name does not explain."""
    blocks = re.split(r"\n\n", VALUES_TEXT)
    plain = {"image", "service", "nodeSelector", "podSecurityContext"}
    for block in blocks:
        names = re.findall(r"^(\w+):", block, re.MULTILINE)
        assert not names or "#" in block or names[0] in plain, block


@each_example
def test_examples_start_a_server_that_takes_their_flags(example: Path) -> None:
    values = yaml.safe_load(example.read_text(encoding="utf-8"))
    check_known(values, SCHEMA)
    flags = [*values.get("args", []), "--drain-seconds", str(values.get("drainSeconds", 60))]
    if "model" in values:
        flags += ["--model", values["model"]]
    nodes = 1
    if values.get("multiNode", {}).get("enabled"):
        nodes = values["multiNode"]["size"]
        flags += shlex.split(f"--nnodes {nodes} --node-rank 1 --master-addr leader")
    config, _ = read_options(create_parser().parse_args(flags))
    assert config.parallel.tensor_parallel_size == nodes * values.get("gpu", {}).get("count", 1)


def render(values: Path) -> list[dict[str, Any]]:
    command = [str(HELM), "template", "kimi", str(CHART), "--namespace", "llm", "--values"]
    result = subprocess.run([*command, str(values)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(result.stderr)
    return [each for each in yaml.safe_load_all(result.stdout) if each]


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for each in objects:
        if each["kind"] == "Deployment":
            found.append(each["spec"]["template"])
        elif each["kind"] == "LeaderWorkerSet":
            group = each["spec"]["leaderWorkerTemplate"]
            found += [group["leaderTemplate"], group["workerTemplate"]]
    return found


@needs_helm
@each_example
def test_helm_renders_the_examples(example: Path) -> None:
    values = {**VALUES, **yaml.safe_load(example.read_text(encoding="utf-8"))}
    objects = render(example)
    kinds = {each["kind"]: each for each in objects}
    (service,) = (each for each in objects if each["kind"] == "Service")
    served, *others = pods(objects)
    assert service["spec"]["selector"].items() <= served["metadata"]["labels"].items()
    for other in others:
        assert not service["spec"]["selector"].items() <= other["metadata"]["labels"].items()
    for pod in (served, *others):
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        is_server = pod is served
        assert spec["terminationGracePeriodSeconds"] > wait + is_server * values["drainSeconds"]
        assert ("startupProbe" in container) == is_server
        assert container["args"][-1:] == values["args"][-1:] or not values["args"]
    probe = served["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= values["startupSeconds"]
    if group := kinds.get("LeaderWorkerSet"):
        # It makes a headless service of its own name.
        assert group["metadata"]["name"] != service["metadata"]["name"]
    if scaled := kinds.get("ScaledObject"):
        target = scaled["spec"]["scaleTargetRef"]
        assert kinds[target["kind"]]["metadata"]["name"] == target["name"]
        assert "replicas" not in kinds[target["kind"]]["spec"]
    if "PrometheusRule" in kinds:
        alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text(encoding="utf-8"))
        assert kinds["PrometheusRule"]["spec"] == alerts
        board = json.loads(kinds["ConfigMap"]["data"]["atom.json"])
        assert board == json.loads((CHART / "files" / "board.json").read_text(encoding="utf-8"))


@needs_helm
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"auth": {}}, "auth.existingSecret"),
        ({"image": {}}, "image.repository"),
        ({"gpu": {"resource": "amd.com/gpu"}}, "gpu.count"),
        ({"multiNode": {"enabled": True, "size": 1}}, "multiNode.size"),
        ({"modle": "x"}, "modle"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_helm_refuses(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    values = yaml.safe_load((CHART / "examples" / "smollm2-cpu.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "values.yaml"
    path.write_text(json.dumps({**values, **change}), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(reason)):
        render(path)


@needs_helm
def test_helm_finds_nothing_to_complain_about() -> None:
    example = CHART / "examples" / "smollm2-cpu.yaml"
    subprocess.run(
        [str(HELM), "lint", "--strict", str(CHART), "--values", str(example)], check=True
    )
