"""A proxy that records what a client sends to a server.

Usage: python tests/entrypoints/recorder.py NAME URL COMMAND...

Runs COMMAND, in which "{url}" stands for the proxy's address, and writes recordings/NAME.json:
the method, path and body of each kind of request, once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

RECORDINGS = Path(__file__).parent / "recordings"


class Recorder(ThreadingHTTPServer):
    """Passes requests on to `target` and keeps them in `recorded`."""

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.recorded: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def record(self, method: str, path: str, data: bytes) -> None:
        request: dict[str, Any] = {"method": method, "path": path}
        if data:
            request["body"] = json.loads(data)
        if _shape(request) not in map(_shape, self.recorded):
            self.recorded.append(request)


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def _pass_on(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.record(self.command, self.path, data)
        headers = {"Content-Type": self.headers.get("content-type", "")} if data else {}
        answer = httpx.request(
            self.command, self.server.target + self.path, content=data, headers=headers, timeout=600
        )
        self.send_response(answer.status_code)
        self.send_header("Content-Type", answer.headers.get("content-type", "text/plain"))
        self.send_header("Content-Length", str(len(answer.content)))
        self.send_header("X-Request-Id", answer.headers["x-request-id"])
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    do_GET = do_HEAD = do_POST = _pass_on


def _shape(value: Any) -> Any:
    """What kinds of values there are where; the same of every text and number."""
    if isinstance(value, dict):
        return {
            name: one if name in ("path", "role", "type") else _shape(one)
            for name, one in value.items()
        }
    return [_shape(one) for one in value] if isinstance(value, list) else type(value).__name__


def main(name: str, target: str, *command: str) -> int:
    recorder = Recorder(target)
    threading.Thread(target=recorder.serve_forever, daemon=True).start()
    code = subprocess.call([part.replace("{url}", recorder.url) for part in command])
    text = json.dumps(recorder.recorded, indent=1, ensure_ascii=False)
    (RECORDINGS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
