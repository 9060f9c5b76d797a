"""Requests of agents and SDKs as their own packages sent them, replayed against the server.

`recordings/agents/` holds one request a file: the client with its version, and what it sent.
Prose was replaced by its length, and what names a machine or a session by zeros.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.http.unknown_fields import IGNORED_FIELDS_HEADER
from atom.entrypoints.server_options import ServerOptions

RECORDINGS = Path(__file__).parents[1] / "recordings" / "agents"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }} {{ m.content }} "
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}"
    "tools: {{ tools | map(attribute='function.name') | join(' ') if tools else none }}"
)
ANSWER = "<think>I look.</think>Fine."


def _options(**given: Any) -> ServerOptions:
    return ServerOptions(
        served_model_names=("tiny", "org/alias"),
        tool_call_parser="hermes",
        reasoning_parser="think_tags",
        enable_auto_tool_choice=True,
        chat_template=TEMPLATE,
        **given,
    )


@pytest.fixture(scope="module")
def server(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    server = ScriptedServer(byte_level_tokenizer, _options(), max_model_len=64_000)
    server.says(ANSWER)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def strict(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    options = _options(unknown_fields="refuse")
    server = ScriptedServer(byte_level_tokenizer, options, max_model_len=64_000)
    server.says(ANSWER)
    try:
        yield server
    finally:
        server.stop()


def _recording(name: str) -> dict[str, Any]:
    return dict(json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8")))


def _replay(server: ScriptedServer, name: str) -> httpx.Response:
    sent = _recording(name)
    url = server.url + sent["path"]
    return httpx.request(
        sent["method"], url, headers=sent["headers"], json=sent.get("body"), timeout=60
    )


def _events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def test_claude_code_probes_the_server(server: ScriptedServer) -> None:
    assert _replay(server, "claude_code_probe").status_code == 200


@pytest.mark.parametrize("name", ["claude_code_title", "claude_code_first_turn"])
@pytest.mark.parametrize("which", ["server", "strict"])
def test_claude_code(request: pytest.FixtureRequest, which: str, name: str) -> None:
    """It sends nothing that even a server that refuses unknown fields refuses."""
    server: ScriptedServer = request.getfixturevalue(which)
    answer = _replay(server, name)
    assert answer.status_code == 200, answer.text
    assert IGNORED_FIELDS_HEADER not in answer.headers
    events = _events(answer)
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    tools = [tool["name"] for tool in _recording(name)["body"].get("tools", [])]
    assert server.prompt.endswith(f"tools: {' '.join(tools) or None}")
    if name == "claude_code_first_turn":
        assert events[-2]["context_management"] == {"applied_edits": []}


def test_claude_code_goes_on_after_a_tool(server: ScriptedServer) -> None:
    assert _replay(server, "claude_code_tool_result").status_code == 200
    assert 'assistant: I look.  {"name": "Bash", "arguments": ' in server.prompt
    assert "tool:  hello" in server.prompt


def test_codex(server: ScriptedServer) -> None:
    answer = _replay(server, "codex_first_turn")
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_FIELDS_HEADER] == "tools[4], tools[8]"
    completed = _events(answer)[-1]
    assert completed["type"] == "response.completed"
    tools = _recording("codex_first_turn")["body"]["tools"]
    own = [tool["name"] for tool in tools if tool["type"] == "function"]
    assert [tool["type"] for tool in tools if tool["type"] != "function"] == [
        "namespace",
        "web_search",
    ]
    assert [tool["name"] for tool in completed["response"]["tools"]] == own
    assert server.prompt.endswith(f"tools: {' '.join(own)}")


def test_codex_goes_on_after_a_tool(server: ScriptedServer) -> None:
    assert _replay(server, "codex_tool_result").status_code == 200
    assert 'assistant: I look.  {"name": "exec_command", "arguments": ' in server.prompt
    assert "tool:  (108 characters)" in server.prompt


def test_tools_of_a_provider_are_refused_where_unknown_fields_are(strict: ScriptedServer) -> None:
    answer = _replay(strict, "codex_first_turn")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools[4]"


@pytest.mark.parametrize(
    "name",
    [
        "anthropic_create",
        "anthropic_stream",
        "anthropic_context_management",
        "anthropic_count_tokens",
        "openai_responses_create",
        "openai_responses_stream",
    ],
)
def test_sdks(strict: ScriptedServer, name: str) -> None:
    answer = _replay(strict, name)
    assert answer.status_code == 200, answer.text


def test_the_tool_runners_thread_is_refused_as_it_understands(server: ScriptedServer) -> None:
    assert _recording("anthropic_tool_runner")["body"]["thread"] == {"type": "create"}
    answer = _replay(server, "anthropic_tool_runner")
    assert answer.status_code == 400
    details = answer.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_the_tool_runner_goes_on_without_a_thread(server: ScriptedServer) -> None:
    import anthropic  # takes seconds, which workers without these tests save

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    server.model.reply = lambda prompt: "It is sunny." if "sunny" in prompt else call
    try:
        runner = client.beta.messages.tool_runner(
            model="tiny",
            max_tokens=200,
            messages=[{"role": "user", "content": "How is Rome?"}],
            tools=[get_weather],
        )
        last = runner.until_done()
    finally:
        server.model.reply = None
    assert asked == ["Rome"]
    assert last.content[-1].to_dict()["text"] == "It is sunny."


def test_a_null_thread_asks_for_nothing(strict: ScriptedServer) -> None:
    body = {"max_tokens": 20, "messages": [{"role": "user", "content": "hi"}], "thread": None}
    assert strict.post("/v1/messages?beta=true", json=body).status_code == 200


PROVIDED: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "memory_20250818", "name": "memory"},
]


def test_tools_that_anthropic_knows_are_left_out(
    server: ScriptedServer, strict: ScriptedServer
) -> None:
    own = {"name": "look", "input_schema": {"type": "object"}}
    body: dict[str, Any] = {"max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
    answer = server.post("/v1/messages", json={**body, "tools": [*PROVIDED, own]})
    assert answer.status_code == 200, answer.text
    assert server.prompt.endswith("tools: look")
    assert answer.headers[IGNORED_FIELDS_HEADER].startswith("tools[0], tools[1]")
    assert server.post("/v1/messages", json={**body, "tools": PROVIDED}).status_code == 200
    assert server.prompt.endswith("tools: None")
    for tool in PROVIDED:
        refused = strict.post("/v1/messages", json={**body, "tools": [own, tool]})
        assert refused.status_code == 400
        assert "tools[1]" in refused.json()["error"]["message"]


def test_a_choice_of_a_tool_that_was_left_out_is_refused(server: ScriptedServer) -> None:
    asked = {"max_tokens": 20, "messages": [{"role": "user", "content": "hi"}], "tools": PROVIDED}
    for choice in ({"type": "any"}, {"type": "tool", "name": "bash"}):
        answer = server.post("/v1/messages", json={**asked, "tool_choice": choice})
        assert answer.status_code == 400


def test_custom_tools_with_a_grammar_are_left_out(server: ScriptedServer) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    tool = {"type": "custom", "name": "apply_patch", "description": "d", "format": grammar}
    answer = server.post("/v1/responses", json={"input": "hi", "tools": [tool]})
    assert answer.status_code == 200
    assert answer.headers[IGNORED_FIELDS_HEADER] == "tools[0]"
    assert answer.json()["tools"] == []
    assert server.prompt.endswith("tools: None")


def test_what_only_calls_of_left_out_tools_would_have_is_harmless(strict: ScriptedServer) -> None:
    included = ["web_search_call.action.sources", "code_interpreter_call.outputs"]
    body = {"input": "hi", "include": included, "client_metadata": {"session": "s"}}
    answer = strict.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert IGNORED_FIELDS_HEADER not in answer.headers


def test_models_in_anthropics_shape(server: ScriptedServer) -> None:
    assert _recording("anthropic_models")["headers"]["anthropic-version"]
    listed = _replay(server, "anthropic_models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny", "org/alias"]
    assert [model["display_name"] for model in listed["data"]] == ["tiny", "alias"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (
        False,
        "tiny",
        "org/alias",
    )
    import anthropic

    models = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).models
    assert [model.id for model in models.list(limit=1)] == ["tiny", "org/alias"]  # page by page
    assert [model.id for model in models.list(before_id="org/alias")] == ["tiny"]
    model = models.retrieve("org/alias")
    assert (model.type, model.max_input_tokens) == ("model", 64_000)
    for query in ("limit=0", "limit=x", "after_id=other"):
        path = f"{server.url}/v1/models?{query}"
        headers = {"anthropic-version": "2023-06-01"}
        assert httpx.get(path, headers=headers).status_code == 400
    plain = httpx.get(f"{server.url}/v1/models").json()
    assert plain["object"] == "list"
