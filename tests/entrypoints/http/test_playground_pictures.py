"""Pictures in the playground, where the model sees."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pictures
import pytest
import seeing
from playground_page import TEXT, finished, send
from scripted_server import ScriptedServer
from seeing import PLACEHOLDER, SCRIPTED_TEMPLATE, Columns
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.server_options import ServerOptions

pytestmark = pytest.mark.browser

PNG = pictures.encoded(pictures.gradient())
# What a browser does with a file that is pasted or dropped.
GIVE = """([how, data]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], `${how}.png`, { type: "image/png" }));
  const fields = { bubbles: true, cancelable: true };
  const event = how === "paste"
    ? new ClipboardEvent("paste", { ...fields, clipboardData: files })
    : new DragEvent("drop", { ...fields, dataTransfer: files });
  document.querySelector("#composer").dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def seeing_server(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    tokenizer = seeing.scripted_tokenizer(byte_level_tokenizer)
    processor = Columns(tokenizer.convert_tokens_to_ids(PLACEHOLDER))
    options = ServerOptions(chat_template=SCRIPTED_TEMPLATE, served_model_names=("sees",))
    server = ScriptedServer(tokenizer, options, image_processor=processor)
    server.says(TEXT)
    yield server
    server.stop()


@pytest.fixture
def seeing_page(browser: Any, seeing_server: ScriptedServer) -> Iterator[Any]:
    page = browser.new_page()
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.goto(f"{seeing_server.url}/")
    page.get_by_role("option", name="sees").wait_for(state="attached")
    yield page
    page.close()
    assert not wrong


def test_pictures_by_button_paste_and_drop(seeing_page: Any, seeing_server: ScriptedServer) -> None:
    page = seeing_page
    file = {"name": "button.png", "mimeType": "image/png", "buffer": PNG}
    page.get_by_label("Add pictures").set_input_files([file])
    for how in ("paste", "drop"):
        page.evaluate(GIVE, [how, base64.b64encode(PNG).decode()])
    for name in ("button.png", "paste.png", "drop.png"):
        page.get_by_alt_text(name).wait_for()
    page.get_by_role("button", name="Remove paste.png").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "What is it?")
    finished(page)
    *images, text = json.loads(sent.value.post_data)["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert images == 2 * [{"type": "image_url", "image_url": {"url": url}}]
    assert seeing_server.prompt == f"user:{14 * PLACEHOLDER}What is it?\n"
    # Each says which tokens of the prompt it became.
    first = seeing_server.model.images[0].start
    captions = page.locator(".user figcaption")
    captions.nth(1).wait_for()
    places = [f"7 tokens, {start} to {start + 6} of the prompt" for start in (first, first + 7)]
    assert captions.all_inner_texts() == places
    # They are decoded and shown, and still there when the page is loaded anew.
    page.reload()
    page.locator("#history .open").click()
    shown = page.locator(".user img").first
    assert shown.evaluate("async (image) => (await image.decode(), image.naturalWidth)") == 7
    # A message may be a picture alone.
    page.get_by_label("Add pictures").set_input_files([file])
    page.get_by_alt_text("button.png").nth(1).wait_for()
    page.get_by_role("button", name="Send").click()
    page.locator(".assistant").nth(1).wait_for()


def test_no_pictures_where_the_model_reads_none(page: Any) -> None:
    assert page.get_by_label("Add pictures").count() == 0
