"""The real clients, installed into folders of their own, against a server of the embedded model.

Needs `uv`, node with npm for the clients of npm, and a package registry.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import seeing
from server_process import ServerProcess
from transformers import PreTrainedTokenizerFast

from atom.config import ModelOptions
from atom.model_loader.source import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(1800)]

CLIENTS = Path(__file__).parents[1] / "clients"
PYTHON_CLIENTS = {
    "openai_python": ["openai"],
    "langchain_chat": ["langchain-openai"],
    "litellm_completion": ["litellm", "mcp"],
}
NODE_CLIENTS = {
    "openai_node": ["openai"],
    "ai_sdk": ["ai@5", "@ai-sdk/openai-compatible@1"],
}
# Large, and here already: clients share those of the running environment.
SHARED = "torch ; sys_platform == 'never'\n"


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model(ModelOptions(quantization="none")).path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    flags = ("--served-model-name", "model", "--max-model-len", "2048", "--kv-cache-memory")
    tools = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")
    process = ServerProcess(model, *flags, "512MiB", *tools, "--unknown-fields", "refuse")
    try:
        yield process.wait_ready()
    finally:
        process.stop()


def _run(command: list[str], folder: Path, seconds: int = 900) -> None:
    # What this environment is told of its own packages is none of a client's business.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        timeout=seconds,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def _environment(folder: Path, *packages: str) -> Path:
    """The bin folder of a new virtual environment with `packages`."""
    uv = shutil.which("uv")
    assert uv is not None, "uv installs the clients"
    overrides = folder / "overrides.txt"
    overrides.write_text(SHARED)
    _run([uv, "venv", "env"], folder)
    python = str(folder / "env" / "bin" / "python")
    _run(
        [uv, "pip", "install", "--python", python, "--override", str(overrides), *packages], folder
    )
    (packages_folder,) = (folder / "env" / "lib").glob("python*/site-packages")
    (packages_folder / "shared.pth").write_text("\n".join(site.getsitepackages()))
    return folder / "env" / "bin"


@pytest.mark.parametrize("name", PYTHON_CLIENTS)
def test_python_clients(server: ServerProcess, tmp_path: Path, name: str) -> None:
    folder = _environment(tmp_path, *PYTHON_CLIENTS[name])
    _run([str(folder / "python"), str(CLIENTS / f"{name}.py"), server.url], tmp_path)


@pytest.mark.parametrize("name", NODE_CLIENTS)
def test_node_clients(server: ServerProcess, tmp_path: Path, name: str) -> None:
    _run(["npm", "install", "--no-audit", "--no-fund", *NODE_CLIENTS[name]], tmp_path)
    script = shutil.copy(CLIENTS / f"{name}.mjs", tmp_path)
    _run(["node", script, server.url], tmp_path)


@pytest.fixture(scope="module")
def seeing_server(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("seeing")
    seeing.write_checkpoint(folder, byte_level_tokenizer)
    process = ServerProcess(folder, *seeing.SERVER_FLAGS)
    try:
        yield process.wait_ready()
    finally:
        process.stop()


def test_langchain_sends_images(seeing_server: ServerProcess, tmp_path: Path) -> None:
    folder = _environment(tmp_path, *PYTHON_CLIENTS["langchain_chat"])
    script = str(CLIENTS / "langchain_images.py")
    _run([str(folder / "python"), script, seeing_server.url], tmp_path)


def test_the_ai_sdk_sends_images(seeing_server: ServerProcess, tmp_path: Path) -> None:
    _run(["npm", "install", "--no-audit", "--no-fund", *NODE_CLIENTS["ai_sdk"]], tmp_path)
    script = shutil.copy(CLIENTS / "ai_sdk_images.mjs", tmp_path)
    _run(["node", script, seeing_server.url], tmp_path)


def test_aiperf(server: ServerProcess, tmp_path: Path, model: Path) -> None:
    folder = _environment(tmp_path, "aiperf")
    command = (
        f"{folder}/aiperf profile -m model --url {server.url} --endpoint-type chat --streaming "
        f"--use-server-token-count --per-chunk-usage --request-count 2 --concurrency 1 "
        f"--synthetic-input-tokens-mean 16 --output-tokens-mean 8 --ui none "
        f"--tokenizer {model} --artifact-dir {tmp_path}/artifacts"
    )
    _run(command.split(), tmp_path)
    (report,) = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    assert json.loads(report.read_text())["request_count"]["avg"] == 2


def test_guidellm(server: ServerProcess, tmp_path: Path, model: Path) -> None:
    folder = _environment(tmp_path, "guidellm", "jinja2")
    command = (
        f"{folder}/guidellm run --backend kind=openai_http,target={server.url} "
        f"--profile kind=synchronous --constraint kind=max_requests,count=2 "
        f"--tokenizer kind=huggingface_auto,model={model} "
        f"--data kind=synthetic_text,prompt_tokens=16,output_tokens=8 --disable-console"
    )
    _run(command.split(), tmp_path)
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == 2


def test_sglangs_benchmark(server: ServerProcess, tmp_path: Path) -> None:
    needed = ("aiohttp", "msgspec", "numpy", "orjson", "requests", "tqdm", "transformers")
    folder = _environment(tmp_path, *needed)
    python = str(folder / "python")
    install = ["uv", "pip", "install", "--python", python, "--no-deps", "sglang"]
    _run(install, tmp_path)
    _run([python, str(CLIENTS / "sglang_generate.py"), server.url], tmp_path)


TASKS: dict[str, dict[str, Any]] = {
    "local_generation": {
        "output_type": "generate_until",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "local_loglikelihood": {
        "output_type": "loglikelihood",
        "doc_to_target": "{{target}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "local_choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{choices.index(target)}}",
        "metric_list": [{"metric": "acc"}],
    },
}
DOCUMENTS = [
    {"text": "The capital of France is", "target": " Paris", "choices": [" Paris", " a potato"]},
    {"text": "Two and two are", "target": " four", "choices": [" four", " penguins"]},
]


def _write_tasks(folder: Path) -> None:
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in TASKS.items():
        shared = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{text}}",
        }
        (folder / f"{name}.yaml").write_text(json.dumps({**shared, **task}))


def _evaluate(lm_eval: str, folder: Path, kind: str, url: str, tasks: str) -> dict[str, Any]:
    chat = ["--apply_chat_template"] if "chat" in kind else []
    arguments = f"model=model,base_url={url},tokenizer_backend=remote,num_concurrent=2"
    command = [lm_eval, "run", "--model", kind, "--model_args", arguments, "--tasks", tasks]
    files = ["--include_path", str(folder), "--output_path", str(folder / kind)]
    _run([*command, *files, *chat], folder)
    (results,) = (folder / kind).rglob("results_*.json")
    found: dict[str, Any] = json.loads(results.read_text())["results"]
    return found


def test_lm_eval(server: ServerProcess, tmp_path: Path) -> None:
    lm_eval = str(_environment(tmp_path, "lm_eval[api]") / "lm_eval")
    _write_tasks(tmp_path)
    url = f"{server.url}/v1/completions"
    found = _evaluate(lm_eval, tmp_path, "local-completions", url, ",".join(TASKS))
    assert found["local_choices"]["acc,none"] == 1
    assert 1 < found["local_loglikelihood"]["perplexity,none"] < 1000
    assert "exact_match,none" in found["local_generation"]
    url = f"{server.url}/v1/chat/completions"
    found = _evaluate(lm_eval, tmp_path, "local-chat-completions", url, "local_generation")
    assert "exact_match,none" in found["local_generation"]
