"""Takes docs/pictures/playground-light.png and -dark.png: the playground with the embedded model.

    python docs/screenshot.py [CHROMIUM]

It needs the extra [test] and a Chromium (/usr/bin/chromium unless named).
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

PICTURES = Path(__file__).parent / "pictures"
QUESTIONS = (
    "Give me three tips for a good night's sleep.",
    "Repeat your second tip, word by word.",
)
SIZE = {"width": 1180, "height": 740}


def main() -> int:
    chromium = sys.argv[1] if len(sys.argv) > 1 else "/usr/bin/chromium"
    command = [sys.executable, "-m", "atom", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            url = next(found[1] for line in server.stderr if (found := _READY.search(line)))
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
                )
                for scheme in ("light", "dark"):
                    _take(browser, url, scheme)
        finally:
            server.terminate()
            server.stderr.read()
    return 0


_READY = re.compile(r"Ready: (\S+)")


def _take(browser: Browser, url: str, scheme: str) -> None:
    page = browser.new_page(viewport=SIZE, color_scheme="dark" if scheme == "dark" else "light")
    page.goto(f"{url}/")
    page.get_by_label("Temperature").fill("0")
    for number, question in enumerate(QUESTIONS, 1):
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        page.locator(".assistant footer").nth(number - 1).wait_for(timeout=120_000)
    page.wait_for_timeout(500)
    path = PICTURES / f"playground-{scheme}.png"
    shot = Image.open(io.BytesIO(page.screenshot()))
    shot.convert("RGB").quantize(128).save(path, optimize=True)
    print(f"wrote {path}: {path.stat().st_size} bytes")
    page.close()


if __name__ == "__main__":
    sys.exit(main())
