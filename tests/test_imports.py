"""Rules about imports and syntax that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from atom import torch_start

ROOT = Path(__file__).parents[1]
PACKAGE_FILES = sorted((ROOT / "atom").rglob("*.py"))
FILES = [*PACKAGE_FILES, *sorted((ROOT / "tests").rglob("*.py"))]
for folder in ("benchmarks", "training"):
    FILES += sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_import_atom_is_instant_and_light() -> None:
    """It loads nothing but its version and what Python itself has."""
    program = (
        "import sys; before = set(sys.modules); import atom; "
        "print(*(set(sys.modules) - before), sep='\\n')"
    )
    command = [sys.executable, "-c", program]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = set(out.split())
    assert {name for name in loaded if is_in(name, ("atom",))} == {"atom", "atom.version"}
    packages = {name.partition(".")[0] for name in loaded}
    assert packages - {"atom"} <= sys.stdlib_module_names - {"asyncio", "multiprocessing"}


def test_the_offline_api_needs_neither_triton_nor_aiter() -> None:
    program = "import sys; sys.modules.update(triton=None, aiter=None); from atom import LLM"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_what_a_start_does_without(tiny_llama_dir: Path) -> None:
    """Each takes long to import: parts of torch, transformers' models, and what servers need."""
    program = """
import sys
from atom.examples.simple_inference import main
given = ["--prompt", "Hi", "--max-tokens", "2", "--dtype", "float32", "--kv-cache-memory", "1MiB"]
assert main(["--model", sys.argv[1], *given]) == 0
slow = ("torch._dynamo", "torch._inductor", "torch._refs", "torch._prims", "torch._decomp",
    "torch.export.exported_program", "torch.ao.quantization", "sympy", "triton", "xgrammar",
    "transformers.models", "matplotlib", "fastapi", "pydantic", "openai", "uvicorn", "zmq",
    "atom.pooling.engine", "atom.entrypoints.offline.pooling", "atom.entrypoints.server")
print(*(name for name in slow if name in sys.modules), file=sys.stderr)
"""
    command = [sys.executable, "-c", program, str(tiny_llama_dir)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr
    assert found.split() == []


def test_a_server_starts_its_engine_before_it_imports_torch(tiny_llama_dir: Path) -> None:
    """Nor anything else that takes long: both processes import at the same time."""
    program = """
import sys
from atom.entrypoints import openai_server
given = openai_server.create_parser().parse_args([sys.argv[1]])
config, _ = openai_server.read_options(given)
assert openai_server.pooling_source(config) is None
with openai_server.spawned_engines(config):
    slow = ("torch", "transformers", "tokenizers", "numpy", "zmq", "fastapi", "uvicorn", "pydantic")
    print(*(name for name in slow if name in sys.modules))
"""
    if torch_start.is_for_gpus():
        pytest.skip("this torch is asked for GPUs before")
    command = [sys.executable, "-c", program, str(tiny_llama_dir)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.split() == []


def test_a_server_of_texts_needs_no_torch(tiny_llama_dir: Path) -> None:
    """Its engine, in another process, says what it has to know of the model."""
    program = """
import asyncio, sys
sys.modules.update(torch=None)
from atom.config import CacheOptions, EngineConfig, ModelOptions
from atom.entrypoints.http.metrics import ServerMetrics
from atom.entrypoints.server import serve
from atom.entrypoints.server_options import ServerOptions
from atom.model_engine.async_engine import AsyncEngine
from atom.sampling_params import SamplingParams

async def main():
    cache = CacheOptions(kv_cache_memory=1 << 20)
    config = EngineConfig(model=ModelOptions(sys.argv[1], dtype="float32"), cache=cache)
    engine = await AsyncEngine.start(config)
    try:
        serve._create_app(engine, ServerOptions(), ServerMetrics())
        async for output in engine.generate("a", [1, 2], SamplingParams(max_tokens=2)):
            last = output
        print(bool(last.outputs[0].token_ids), engine.model_name, engine.model_type)
    finally:
        await engine.shutdown(0)

asyncio.run(main())
"""
    command = [sys.executable, "-c", program, str(tiny_llama_dir)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["True", str(tiny_llama_dir), "llama"]


def test_the_scheduler_needs_no_torch() -> None:
    """It is host code, and so are the sequences and blocks that it handles."""
    program = "import sys; sys.modules.update(torch=None); import atom.model_engine.scheduler"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_parses_on_python_3_10() -> None:
    wrong = []
    for path in FILES:
        try:
            if path in PACKAGE_FILES:
                found_in(path)  # kept for the other tests
            else:
                parsed(path)
        except SyntaxError as error:
            wrong.append(f"{name_of(path)}: {error}")
    assert len(FILES) > 1000
    assert wrong == []


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))


@dataclass(frozen=True)
class Found:
    """What tests ask of a file, which takes longer to parse than to look through.

    Attributes:
        imported: modules, and names that may be modules.
        unpickles: places where something may be unpickled, and how.
        reads_environment: lines.
    """

    imported: list[str] = field(default_factory=list)
    unpickles: list[str] = field(default_factory=list)
    reads_environment: list[int] = field(default_factory=list)


@cache
def found_in(path: Path) -> Found:
    found = Found()
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Import():
                found.imported.extend(alias.name for alias in node.names)
            case ast.ImportFrom():
                assert node.level == 0, f"{name_of(path)}:{node.lineno} has a relative import"
                found.imported.append(f"{node.module}")
                found.imported.extend(f"{node.module}.{alias.name}" for alias in node.names)
            case ast.Attribute(value=ast.Name("torch"), attr="load"):
                found.unpickles.append(f"{name_of(path)}:{node.lineno} calls torch.load")
            case ast.Attribute(attr="send_pyobj" | "recv_pyobj"):
                found.unpickles.append(f"{name_of(path)}:{node.lineno} pickles over ZMQ")
            case ast.keyword(arg="allow_pickle"):
                found.unpickles.append(f"{name_of(path)}:{node.value.lineno} allows pickle")
            case ast.Attribute(attr="environ" | "getenv"):
                found.reads_environment.append(node.lineno)
    return found


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


@cache
def packages_in_order() -> list[str]:
    """The packages of docs/architecture.md, from the top down."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split("| package | holds |", 1)[1].split("\n\n", 1)[0]
    return [line.split("`")[1].removesuffix(".py") for line in table.splitlines() if "`" in line]


def package_of(path: Path) -> str:
    return path.relative_to(ROOT / "atom").with_suffix("").parts[0]


def test_every_package_stands_in_the_documentation() -> None:
    packages = {package_of(path) for path in PACKAGE_FILES} - {"__init__"}
    assert packages == set(packages_in_order())


def test_imports_go_down() -> None:
    """A package imports itself and those below it; only `import atom` itself may name any."""
    packages = packages_in_order()
    wrong = []
    for path in PACKAGE_FILES:
        if path == ROOT / "atom" / "__init__.py":
            continue
        above = packages[: packages.index(package_of(path))]
        upper = tuple(f"atom.{package}" for package in above)
        wrong += [
            f"{name_of(path)} imports {module}"
            for module in found_in(path).imported
            if is_in(module, upper)
        ]
    assert wrong == []


def _packages(path: Path) -> tuple[str, ...]:
    """The folders below `atom` that a file lies in, from the top down."""
    return path.relative_to(ROOT / "atom").parts[:-1]


@cache
def _module_paths() -> dict[str, Path]:
    names = {}
    for path in PACKAGE_FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def _sibling_imports() -> dict[tuple[str, ...], dict[str, dict[str, str]]]:
    """For each folder: which of its folders import which others, with one import of each.

    A file counts for every folder above it. Files that lie beside the folders are left out: a
    folder's own files may use what is below them, and the other way round.
    """
    found: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for path in PACKAGE_FILES:
        here = _packages(path)
        for module in found_in(path).imported:
            if (target := _module_paths().get(module)) is None:
                continue
            there = _packages(target)
            is_same = [a == b for a, b in zip(here, there, strict=False)]
            if not all(is_same):
                depth = is_same.index(False)
                arrows = found.setdefault(here[:depth], {}).setdefault(here[depth], {})
                arrows[there[depth]] = f"{name_of(path)} imports {module}"
    return found


def test_folders_import_one_way() -> None:
    """Folders that lie side by side have an order, at every level: there is no way back."""
    wrong = []
    for arrows in _sibling_imports().values():
        sorter = TopologicalSorter({name: others.keys() for name, others in arrows.items()})
        try:
            sorter.prepare()
        except CycleError as error:
            circle = error.args[1][::-1]
            wrong += [arrows[name][other] for name, other in pairwise(circle)]
    assert wrong == []


def test_the_engine_does_without_the_training() -> None:
    """Which is a distribution of its own, that the `atom` command starts by its name."""
    wrong = {
        name_of(path)
        for folder in ("atom", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if any(is_in(module, ("atom_train",)) for module in found_in(path).imported)
    }
    assert wrong == set()


def test_nothing_is_unpickled() -> None:
    """Checkpoints are data, and so are messages: neither may run code."""
    modules = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "torch.load")
    wrong = {
        f"{name_of(path)} imports {module}"
        for path in PACKAGE_FILES
        for module in found_in(path).imported
        if is_in(module, modules)
    }
    wrong |= {place for path in PACKAGE_FILES for place in found_in(path).unpickles}
    assert wrong == set()


def test_no_test_file_imports_anthropic() -> None:
    """It takes seconds in each process that collects tests, and few of these run one with it."""
    top = re.compile(r"^(import|from) anthropic\b", re.MULTILINE)
    tests = [path for path in FILES if "tests" in path.parts and path != Path(__file__)]
    assert [name_of(path) for path in tests if top.search(path.read_text(encoding="utf-8"))] == []


def test_one_file_reads_the_environment() -> None:
    wrong = {
        f"{name_of(path)}:{line}"
        for path in PACKAGE_FILES
        if path != ROOT / "atom" / "environment.py"
        for line in found_in(path).reads_environment
    }
    assert wrong == set()


def test_one_file_counts_processors() -> None:
    """Those of the machine may be many more than a container has."""
    counts = {name_of(p) for p in PACKAGE_FILES if "cpu_count" in p.read_text(encoding="utf-8")}
    assert counts == {"atom/processors.py"}


def test_one_file_knows_another_stream_of_the_device() -> None:
    """Kernels share what they count with, since all work of a device runs one after the other:
    graphs are captured on a stream that waits for the other one, and that the other one waits for.
    """
    knows = re.compile(r"\b(Stream\(|\w+\.stream\(|ExternalStream|set_stream)")
    found = {
        name_of(path)
        for path in PACKAGE_FILES
        for line in path.read_text(encoding="utf-8").splitlines()
        if "torch" in line and knows.search(line)
    }
    assert found == {"atom/graphs/capture.py"}
