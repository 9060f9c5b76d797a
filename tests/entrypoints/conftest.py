from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import endless
import openai
import patience
import playground_page
import pytest
from scripted_server import ScriptedServer
from server_process import ServerProcess
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.server_options import ServerOptions


@pytest.fixture(scope="session")
def server(tiny_llama_dir: Path) -> Iterator[ServerProcess]:
    """An open server of the tiny model, under the names `tiny` and `alias`."""
    process = ServerProcess(tiny_llama_dir, "--served-model-name", "tiny", "alias")
    try:
        yield process.wait_ready()
    finally:
        process.stop()


@pytest.fixture(scope="session")
def endless_server(endless_llama_dir: Path) -> Iterator[ServerProcess]:
    """An open server for requests of `endless.ENDLESS_TOKENS`."""
    process = ServerProcess(endless_llama_dir, *endless.SERVER_FLAGS)
    try:
        yield process.wait_ready()
    finally:
        process.stop()


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def scripted(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    """A server with a key whose answers are scripted, drafts included."""
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    options = ServerOptions(
        chat_template=template,
        served_model_names=("first", "second"),
        given_api_keys=(playground_page.KEY,),
        tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
        unknown_fields="refuse",
        root_path="/llm",
    )
    drafts = {"method": "suffix", "num_speculative_tokens": 3}
    server = ScriptedServer(byte_level_tokenizer, options, engine_options=drafts)
    server.model.drafts = lambda number: playground_page.STEPS[number % len(playground_page.STEPS)]
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, scripted: ScriptedServer) -> Iterator[Any]:
    """A page that has the key; no error and no other host is let pass."""
    scripted.says(playground_page.TEXT)
    scripted.model.seconds_per_step = 0.0
    context = browser.new_context(viewport={"width": 1380, "height": 860})
    context.set_default_timeout(1000 * patience.PATIENCE_SECONDS)
    context.add_init_script(f"sessionStorage['atom.key'] ??= '{playground_page.KEY}'")
    wrong: list[str] = []

    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on(
        "request",
        lambda sent: None if sent.url.startswith(scripted.url) else wrong.append(sent.url),
    )
    page.wrong = wrong
    page.goto(f"{scripted.url}/")
    page.get_by_role("option", name="second").wait_for(state="attached")
    yield page
    context.close()
    assert not wrong
