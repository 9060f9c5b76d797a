"""Every command in recipes/*.md: parsed by the program that it starts, and run where it can be.

What runs, runs on a tiny checkpoint with fewer tokens; nothing else is changed.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from ports import free_port

from atom.config import ConfigError
from atom.entrypoints.openai_server import create_parser as server_parser
from atom.entrypoints.ray_options import read_args
from atom.entrypoints.server_options import ServerOptions
from atom.entrypoints.terminal import command as atom_command
from atom.entrypoints.terminal.command import PROGRAMS
from atom.examples import simple_inference
from atom.model_engine.arg_utils import engine_config, engine_options
from atom.plan.rehearsal.cli import create_parser as rehearsal_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
RECIPES = sorted(set((ROOT / "recipes").glob("*.md")) - {ROOT / "recipes" / "README.md"})
SERVER = "atom.entrypoints.openai_server"
DEMO = "atom.examples.simple_inference"
TRAINING = "atom_train"

# Programs of others, which are not here, or change the machine.
FOREIGN = {"docker", "git", "helm", "kubectl", "lm_eval", "pip", "serve", "python3"}
FOREIGN |= {"rocm-smi", "rocminfo"}
# On the tiny model, briefly.
TINY = ("--dtype", "float32", "--num-threads", "1", "--kv-cache-memory", "4MiB")


@dataclass(frozen=True)
class Command:
    """One command of a recipe.

    Attributes:
        program: a module, a file of benchmarks/ without its ending, or another program's name.
    """

    recipe: str
    line: int
    program: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.recipe}:{self.line} {self.program}"

    def value(self, flag: str) -> str | None:
        if flag not in self.arguments:
            return None
        return self.arguments[self.arguments.index(flag) + 1]


def read_commands(path: Path) -> list[Command]:
    """The commands of all fenced `bash` blocks, continued lines joined."""
    commands = []
    text = path.read_text(encoding="utf-8")
    for block in re.finditer(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        first = text.count("\n", 0, block.start()) + 2
        pending = ""
        for number, line in enumerate(block[1].splitlines()):
            pending += line + "\n"
            if line.endswith("\\") or pending.count("'") % 2:
                continue
            words = shlex.split(pending.replace("\\\n", " "), comments=True)
            pending = ""
            if words:
                commands.append(_command(path.name, first + number, words))
        assert not pending, f"{path}: a command is not finished"
    return commands


def _command(recipe: str, line: int, words: list[str]) -> Command:
    while re.match(r"[A-Z_]+=", words[0]):  # of the environment
        words = words[1:]
    program, *arguments = words
    if program == "./scripts/demo":
        program = SERVER if arguments[:1] == ["--serve"] else DEMO
        arguments = arguments[program == SERVER :]
    elif program in ("python", ".venv/bin/python"):
        program, *arguments = arguments
        if program == "-m":
            program, *arguments = arguments
    program = program.removeprefix(".venv/bin/").removeprefix("lm_eval/bin/")
    program = program.removeprefix("benchmarks/").removesuffix(".py")
    program = {"./scripts/gpu-check": "gpu_check"}.get(program, program)
    return Command(recipe, line, program, tuple(arguments))


COMMANDS = [command for path in RECIPES for command in read_commands(path)]


def of(*programs: str, recipes: str = "") -> Any:
    chosen = [c for c in COMMANDS if c.program in programs and recipes in c.recipe]
    assert chosen
    return pytest.mark.parametrize("command", chosen, ids=str)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files that recipes name."""
    for name, record in {
        "gsm8k/train.jsonl": {"question": "What is one and one?", "answer": "#### 2"},
        "gsm8k/test.jsonl": {"question": "What is two and two?", "answer": "#### 4"},
        "mt_bench/question.jsonl": {"turns": ["Write a poem.", "Once more."]},
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(record) + "\n", encoding="utf-8")
    (tmp_path / "prompts.txt").write_text("Why?\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def tiny_draft(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A random Eagle3 draft for the tiny model."""
    from spec_decode import draft_bench

    raw = {**draft_bench.MHA, "hidden_size": 64, "vocab_size": len(byte_level_tokenizer)}
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    tensors = draft_bench.draft_tensors(raw)
    return draft_bench.write_draft(tmp_path_factory.mktemp("tiny-draft"), raw, tensors)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_command_is_known(recipe: Path) -> None:
    """A fence without a language would escape these tests."""
    fences = re.findall(r"^```(.*)$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences[::2]) <= {"bash"}
    assert set(fences[1::2]) <= {""}
    commands = read_commands(recipe)
    assert commands
    benchmarks = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    known = {SERVER, DEMO, TRAINING, "atom", "curl", *FOREIGN, *benchmarks}
    assert {command.program for command in commands} <= known


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_links_lead_somewhere(recipe: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", recipe.read_text(encoding="utf-8")):
        file = recipe.parent / target.partition("#")[0]
        assert target.startswith("https://") or file.exists(), target


@of(SERVER)
def test_server_flags(command: Command) -> None:
    """Commands that the engine refuses belong to recipes that quote the refusal."""
    namespace = server_parser().parse_args(command.arguments)
    ServerOptions.from_cli_args(namespace)
    try:
        engine_config(**engine_options(namespace))
    except ConfigError as error:
        reason = str(error).partition(";")[0]
        text = (ROOT / "recipes" / command.recipe).read_text(encoding="utf-8")
        assert f"`{reason}`" in text, f"the recipe hides that {reason}"


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "recipes" / name).read_text(encoding="utf-8")))


def test_the_ray_service_has_arguments_that_are_known() -> None:
    (service,) = manifests("kuberay.yaml")
    (app,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert app["import_path"] == "atom.entrypoints.ray_serve:build_app"
    options = read_args(app["args"])
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["maxReplicas"] == options.scaling.max_replicas
    assert group["rayStartParams"]["num-gpus"] == str(options.num_gpus)
    grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > options.server.drain_seconds


@of("serve")
def test_arguments_of_ray_serve(command: Command) -> None:
    run, app, *arguments = command.arguments
    assert (run, app) == ("run", "atom.entrypoints.ray_serve:build_app")
    read_args(dict(argument.split("=", 1) for argument in arguments))


@of(TRAINING)
def test_training_flags(command: Command) -> None:
    from atom_train.cli import create_parser

    args = create_parser().parse_args(command.arguments)
    if args.command != "export":
        engine_config(**engine_options(args))


@of("atom")
def test_atom_flags(command: Command) -> None:
    program, words = PROGRAMS[command.arguments[0]], command.arguments[1:]
    while program.programs:
        program, words = program.programs[words[0]], words[1:]
    if "--rehearse" in words:
        args = rehearsal_parser().parse_args(words)
        engine_config(**engine_options(args))
        return
    importlib.import_module(program.entry.partition(":")[0]).create_parser().parse_args(words)


@of(
    "acceptance", "accuracy", "compare_transformers", "decode_roofline", "gpu_check", "kernels"
)  # fmt: skip
def test_benchmark_flags(
    command: Command, benchmark_module: Callable[[str], Any], folder: Path
) -> None:
    module = benchmark_module(command.program)
    if command.program == "acceptance":
        args = module.create_parser().parse_args(command.arguments)
        prompts = module.read_prompts(args)
        assert all(prompts.values())
    else:
        args = module.parse_args(command.arguments)
    if command.program == "accuracy":
        args.entries = ROOT / "recipes" / "accuracy.toml"
        assert len(module.choose(args)) == len(args.names) > 0
    assert folder.is_dir()


def test_lm_eval_by_hand(benchmark_module: Callable[[str], Any]) -> None:
    """The written command is the one that accuracy.py would run."""
    (command,) = (c for c in COMMANDS if c.program == "lm_eval")
    entries = benchmark_module("_accuracy_entries").read_entries(ROOT / "recipes" / "accuracy.toml")
    entry = entries["kimi-k2.5"]
    ours = benchmark_module("_lm_eval").lm_eval_command(
        "lm_eval", entry, entry.task, "http://127.0.0.1:8000", entry.model, Path("."), None
    )
    for flag in ("--model", "--tasks", "--num_fewshot", "--batch_size", "--model_args"):
        assert command.value(flag) == ours[ours.index(flag) + 1]


@of(DEMO)
def test_demos_run(
    command: Command,
    folder: Path,
    tiny_llama_dir: Path,
    tiny_draft: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--model", str(tiny_llama_dir), "--max-tokens", "6", *TINY]
    flags += ["--draft-model", str(tiny_draft)] if command.value("--draft-model") else []
    assert simple_inference.main([*command.arguments, *flags]) == 0
    output = capsys.readouterr().out
    assert "tokens/s" in output
    if "--method" not in command.arguments:
        assert "speculation:" not in output
    elif "eagle3" in command.arguments:  # a lookup may find nothing
        assert "speculation:" in output
    assert folder.is_dir()


@of("acceptance", recipes="SmolLM2")
def test_acceptance_runs(
    command: Command,
    benchmark_module: Callable[[str], Any],
    folder: Path,
    tiny_llama_dir: Path,
    tiny_draft: Path,
) -> None:
    flags = ["--model", str(tiny_llama_dir), "--max-tokens", "6", *TINY, "--method", "eagle3"]
    flags += ["--draft-model", str(tiny_draft), "--limit", "1"]
    assert benchmark_module("acceptance").main([*command.arguments, *flags]) == 0
    if output := command.value("--output-dir"):
        assert (folder / output / "acceptance.png").exists()


@of("atom", "compare_transformers", recipes="SmolLM2")
def test_benchmarks_run(
    command: Command, benchmark_module: Callable[[str], Any], folder: Path, tiny_llama_dir: Path
) -> None:
    flags = ["--model", str(tiny_llama_dir), "--max-tokens", "4", "--rounds", "1"]
    flags += ["--dtype", "float32", "--num-threads", "1", "--output-json", "report.json"]
    if command.program == "compare_transformers":
        benchmark_module(command.program).main(
            [*command.arguments, *flags, "--prefill-tokens", "32"]
        )
    else:
        assert atom_command.main([*command.arguments, *flags, "--num-prompts", "4"]) == 0
    assert json.loads((folder / "report.json").read_text(encoding="utf-8"))


def test_the_server_answers_what_curl_asks(
    benchmark_module: Callable[[str], Any],
    tiny_llama_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One server of the SmolLM2 recipe, every curl command of all recipes."""
    chosen = [c for c in COMMANDS if c.program == SERVER and c.recipe == "SmolLM2.md"]
    flags = list(chosen[0].arguments)
    place = flags.index("--port")
    del flags[place : place + 2]
    model = ["--model", str(tiny_llama_dir), *TINY, "--method", "suffix"]
    model += ["--num-speculative-tokens", "2"]
    monkeypatch.setattr(benchmark_module("_server"), "free_port", free_port)
    server = benchmark_module("_server").Server([*flags, *model], tmp_path / "server.log")
    with server:
        server.wait_healthy(240)
        for command in (c for c in COMMANDS if c.program == "curl"):
            (url,) = (word for word in command.arguments if word.startswith("http://"))
            url = url.replace("http://127.0.0.1:8000", server.url)
            body = command.value("-d")
            if body is None:
                answer = httpx.get(url, timeout=60)
            else:
                headers = dict([str(command.value("-H")).split(": ", 1)])
                answer = httpx.post(url, content=body, headers=headers, timeout=60)
            assert answer.status_code == 200, f"{command}: {answer.text}"
            if url.endswith("/metrics"):
                for name in ("num_accepted_tokens", "num_draft_tokens"):
                    assert f"atom:spec_decode_{name}_total" in answer.text
            if body is not None:
                assert answer.text.endswith("data: [DONE]\n\n")
