"""The playground where something goes wrong: servers, networks, settings, other tabs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playground_page import TEXT, finished, send
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.server_options import ServerOptions

pytestmark = pytest.mark.browser

CHAT = "**/v1/chat/completions"
MARKUP = "<img src=x onerror=alert(1)> <script>alert(2)</script> [a](javascript:alert(3))"
MODEL = {"max_model_len": 8, "speculation": None}


def _titles(page: Any) -> list[str]:
    return [each.inner_text() for each in page.locator("#history .open").all()]


def test_markup_is_text(page: Any, scripted: ScriptedServer) -> None:
    """A model's answer, a person's message and the name made from it are never read as HTML."""
    scripted.says(MARKUP)
    page.on("dialog", lambda dialog: page.wrong.append(dialog.message) or dialog.dismiss())
    send(page, MARKUP)
    assert finished(page).locator("> .text").inner_text() == MARKUP
    page.reload()
    page.locator("#history .open").click()
    assert page.locator(".user .text").inner_text() == MARKUP
    assert page.locator("#app img, #app script, #app a:not(.skip)").count() == 0


@pytest.mark.parametrize(
    ("status", "body", "shown"),
    [
        (
            413,
            json.dumps({"error": {"message": "the body is too large"}}),
            "The body is too large.",
        ),
        (429, json.dumps({"error": {"message": "8 requests wait"}}), "8 requests wait."),
        (503, json.dumps({"error": {"message": "the engine died"}}), "The engine died."),
        (502, "<h1>Bad gateway</h1>", "The server answered 502."),
    ],
)
def test_a_refusal_says_why(page: Any, status: int, body: str, shown: str) -> None:
    page.route(CHAT, lambda route: route.fulfill(status=status, body=body), times=1)
    send(page)
    problem = page.locator(".assistant .problem")
    problem.wait_for()
    assert problem.inner_text() == shown
    page.wrong.clear()  # the console lists the status
    # The answer that never was is not told to the model.
    with page.expect_request(CHAT) as sent:
        send(page, "And now?")
    asked = json.loads(sent.value.post_data)
    assert [message["role"] for message in asked["messages"]] == ["user", "user"]
    finished(page)


def test_a_prompt_that_does_not_fit(page: Any) -> None:
    send(page, "word " * 9000)
    problem = page.locator(".assistant .problem")
    problem.wait_for()
    assert "8000" in problem.inner_text()
    page.wrong.clear()


def test_another_model_after_a_restart(page: Any) -> None:
    listed = json.dumps({"data": [{"id": "third", **MODEL}]})
    page.route("**/v1/models", lambda route: route.fulfill(body=listed))
    page.route(CHAT, lambda route: route.abort(), times=1)
    send(page)
    page.get_by_role("option", name="third").wait_for(state="attached")
    assert page.locator(".assistant .problem").inner_text() == "The server cannot be reached."
    page.wrong.clear()
    with page.expect_request(CHAT) as sent:
        page.get_by_role("button", name="Retry").click()
    assert json.loads(sent.value.post_data)["model"] == "third"
    page.locator(".assistant .problem").wait_for()  # there is none of that name
    page.wrong.clear()


def test_two_tabs_keep_both_conversations(page: Any, scripted: ScriptedServer) -> None:
    other = page.context.new_page()
    other.goto(f"{scripted.url}/")
    other.get_by_role("option", name="second").wait_for(state="attached")
    send(page, "One")
    finished(page)
    other.get_by_role("button", name="One", exact=True).wait_for()
    send(other, "Two")
    finished(other)
    page.get_by_role("button", name="Two", exact=True).wait_for()
    send(page, "More")
    finished(page)
    other.get_by_role("button", name="Delete Two").click()
    page.get_by_role("button", name="Two", exact=True).wait_for(state="detached")
    page.reload()
    assert _titles(page) == ["One"]


def test_a_deleted_conversation_stays_deleted(page: Any, scripted: ScriptedServer) -> None:
    """Also while an answer to it comes."""
    scripted.model.seconds_per_step = 0.05
    send(page)
    page.locator(".assistant .token").first.wait_for()
    page.get_by_role("button", name="Delete Why").click()
    page.wait_for_timeout(300)
    assert _titles(page) == []
    page.reload()
    assert _titles(page) == []


def test_settings_that_cannot_be(page: Any) -> None:
    send(page)
    answer = finished(page)
    page.get_by_text("Tools (JSON)").click()
    page.get_by_label("Tools (JSON)").fill("[{]")
    assert "JSON" in page.locator(".invalid").inner_text()
    answer.get_by_role("button", name="Copy as curl").click()
    assert page.locator(".chat > .problem").inner_text().startswith("Tools: ")
    send(page)
    assert page.locator(".assistant").count() == 1
    page.get_by_label("Tools (JSON)").fill("")
    page.get_by_label("Seed").fill("9007199254740993")
    send(page)
    assert "seed" in page.locator(".chat > .problem").inner_text()
    page.get_by_label("Seed").fill("")
    page.get_by_label("Temperature").fill("-1")
    send(page)
    page.locator(".assistant .problem").get_by_text("temperature").wait_for()
    page.wrong.clear()  # 400


def test_a_drawer_closes_with_escape(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_role("button", name="Panel").click()
    assert page.locator("#panel").is_visible()
    assert page.evaluate("document.querySelector('main').inert")
    page.keyboard.press("Escape")
    assert not page.locator("#panel").is_visible()


def test_below_a_path(page: Any, scripted: ScriptedServer) -> None:
    page.goto(f"{scripted.url}/llm")
    assert page.url == f"{scripted.url}/llm/"
    page.get_by_role("option", name="second").wait_for(state="attached")
    with page.expect_request("**/llm/v1/chat/completions"):
        send(page)
    assert finished(page).locator("> .text").inner_text() == TEXT


@pytest.fixture(scope="module")
def plain(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    """A server without speculation, and without a key."""
    server = ScriptedServer(byte_level_tokenizer, ServerOptions())
    yield server
    server.stop()


def test_without_speculation_there_is_no_race(browser: Any, plain: ScriptedServer) -> None:
    page = browser.new_page()
    page.goto(f"{plain.url}/")
    page.get_by_role("heading", name="Every token takes a forward of its own").wait_for()
    assert page.get_by_label("Speculation (the server has none)").is_disabled()
    page.get_by_role("button", name="Race").click()
    assert "nothing to race" in page.locator(".race").inner_text()
    assert page.locator(".race button").count() == 0
    page.close()
