"""Images and the compose file: locks, steps, and what they start."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from atom.entrypoints.openai_server import create_parser, read_options

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy" / "images"
COMPOSE = ROOT / "deploy" / "compose"
DOCKERFILE = (IMAGES / "Dockerfile").read_text(encoding="utf-8")
KINDS = ("cpu", "cuda", "rocm")
# The Python that an image's base has.
PYTHON = {"cpu": "3.11", "cuda": "3.11", "rocm": "3.12"}

each_kind = pytest.mark.parametrize("kind", KINDS)


def locked(kind: str) -> dict[str, Version]:
    """Every package of a lock, each with hashes and nothing else."""
    text = (IMAGES / f"{kind}.txt").read_text(encoding="utf-8")
    packages = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        if entry.startswith("#"):
            continue
        pin, *hashes = entry.split(" \\\n    ")
        assert hashes, pin
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), pin
        name, _, version = pin.partition("==")
        packages[name] = Version(version)
    return packages


def wanted(kind: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    files = ["packages.in", *(["aiter.in"] if kind == "rocm" else [])]
    for name in files:
        text = (IMAGES / name).read_text(encoding="utf-8")
        lines += [line for line in text.splitlines() if not line.startswith("#")]
    environment = {"python_version": PYTHON[kind], "sys_platform": "linux"}
    requirements = [Requirement(line) for line in lines]
    return [r for r in requirements if r.marker is None or r.marker.evaluate(environment)]


@each_kind
def test_locks_hold_what_the_project_needs(kind: str) -> None:
    """After a change of pyproject.toml: ./deploy/images/lock."""
    packages = locked(kind)
    for requirement in wanted(kind):
        name = requirement.name.lower().replace("_", "-")
        if name == "torch" and kind == "rocm":
            continue
        assert name in packages, f"{kind}.txt has no {name}: run ./deploy/images/lock"
        assert requirement.specifier.contains(packages[name], prereleases=True), name


def test_each_image_has_the_torch_of_its_device() -> None:
    torches = {kind: locked(kind).get("torch") for kind in KINDS}
    assert torches["cpu"] is not None
    assert torches["cpu"].local == "cpu"
    assert torches["cuda"] is not None
    assert torches["cuda"].local is None
    assert torches["rocm"] is None
    assert "nvidia-nccl-cu13" in locked("cuda")
    for kind in ("cpu", "rocm"):
        assert not [name for name in locked(kind) if name.startswith(("triton", "nvidia-"))]


@each_kind
def test_locks_name_no_host(kind: str) -> None:
    assert "://" not in (IMAGES / f"{kind}.txt").read_text(encoding="utf-8")


@each_kind
def test_a_bill_of_materials_names_all_that_is_locked(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, IMAGES / "sbom", kind], capture_output=True, text=True, check=True
    )
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    found = {each["name"]: Version(each["version"]) for each in bill["components"]}
    assert found == locked(kind)
    text = (IMAGES / f"{kind}.txt").read_text(encoding="utf-8")
    hashes = [each["value"] for part in bill["components"] for each in part["properties"]]
    assert sorted(hashes) == sorted(re.findall(r"sha256:(\w+)", text))
    assert all("+" not in each["purl"] for each in bill["components"])


def test_a_bill_is_of_an_image(capfd: pytest.CaptureFixture[str]) -> None:
    assert subprocess.run([sys.executable, IMAGES / "sbom", "tpu"], check=False).returncode == 2
    assert "cpu,cuda,rocm" in capfd.readouterr().err


def test_the_server_is_the_first_process_and_nobody_special() -> None:
    (user,) = re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)
    assert int(user.partition(":")[0]) > 0
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    words = yaml.safe_load(entry)  # a list: no shell between
    assert words[:3] == ["python3", "-m", "atom.entrypoints.openai_server"]
    _, options = read_options(create_parser().parse_args(words[3:]))
    assert options.host == "0.0.0.0"
    # A later --host of the user's wins.
    _, options = read_options(create_parser().parse_args([*words[3:], "--host", "127.0.0.1"]))
    assert options.host == "127.0.0.1"


@each_kind
def test_every_kind_has_its_stages(kind: str) -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert {f"base-{kind}", f"kernels-{kind}"} <= set(stages)


def test_a_rocm_image_refuses_another_torch(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho 2.13.0 None\n")
    python.chmod(0o755)
    result = subprocess.run(
        [IMAGES / "install", "packages", "rocm"],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "not built for ROCm: 2.13.0 None" in result.stderr


def services(name: str) -> dict[str, dict[str, Any]]:
    return yaml.safe_load((COMPOSE / name).read_text(encoding="utf-8"))["services"]


def test_compose_mounts_files_that_there_are() -> None:
    mounts = [m for service in services("compose.yaml").values() for m in service["volumes"]]
    files = [mount.partition(":")[0] for mount in mounts if mount.startswith(".")]
    assert len(files) == 5
    for file in files:
        assert (COMPOSE / file).resolve().is_file(), file
    build = services("compose.yaml")["atom"]["build"]
    assert (COMPOSE / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_compose_starts_a_server_that_has_time_to_drain() -> None:
    service = services("compose.yaml")["atom"]
    flags = service["command"].replace("${FLAGS-}", "--model Qwen/Qwen3-8B").split()
    _, options = read_options(create_parser().parse_args(flags))
    assert int(service["stop_grace_period"].removesuffix("s")) > options.drain_seconds + 5
    for kind in ("cuda", "rocm"):
        assert services(f"{kind}.yaml")["atom"]["build"]["args"]["KIND"] == kind


def test_compose_gives_amd_gpus_what_the_recipe_does() -> None:
    recipe = (ROOT / "recipes" / "ROCm.md").read_text(encoding="utf-8")
    service = services("rocm.yaml")["atom"]
    given = [f"--device={device}" for device in service["devices"]]
    given += [f"--ipc={service['ipc']}"]
    given += [f"--security-opt {option}" for option in service["security_opt"]]
    assert [flag for flag in given if flag not in recipe] == []
    assert len(given) == 4


def test_what_an_image_compiles_goes_to_its_volume() -> None:
    """The caches of ATOM, of aiter's templates and of FlyDSL are below the home folder."""
    [volume] = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.MULTILINE)
    variables = dict(
        pair.split("=", 1)
        for line in re.findall(r"^ENV (.*)$", DOCKERFILE, re.MULTILINE)
        for pair in line.split()
    )
    assert (variables["HOME"], variables["XDG_CACHE_HOME"]) == (volume, volume)
    others = ("ATOM_CACHE", "AITER_JIT_DIR", "AITER_ROOT_DIR", "FLYDSL_RUNTIME_CACHE_DIR")
    assert not set(others) & set(variables)


def run_tool(name: str, *arguments: object) -> None:
    if (program := shutil.which(name)) is None:
        pytest.skip(f"{name} is not installed")
    subprocess.run([program, *map(str, arguments)], check=True)


def test_hadolint() -> None:
    run_tool("hadolint", IMAGES / "Dockerfile")


def test_shellcheck() -> None:
    run_tool("shellcheck", IMAGES / "install", IMAGES / "lock")
