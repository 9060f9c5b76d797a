"""A server without a model: answers completions and chats, and counts drafts as ours does.

python stub_server.py --port P [--prefix vllm] [--die | --never-healthy]
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# What each answer adds: 10 verified steps of 3 drafts, accepted at the positions so often.
STEPS, ACCEPTED = 10, (6, 4, 2)


class Stub(ThreadingHTTPServer):
    def __init__(self, port: int = 0, prefix: str = "atom", healthy: bool = True) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.prefix, self.healthy = prefix, healthy
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def metrics(self) -> str:
        answers = len(self.bodies)
        values = {"num_drafts": STEPS, "num_draft_tokens": 3 * STEPS}
        values["num_accepted_tokens"] = sum(ACCEPTED)
        lines = [
            f'{self.prefix}:spec_decode_{name}_total{{engine="0"}} {float(value * answers)}'
            for name, value in values.items()
        ]
        lines += [
            f'{self.prefix}:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}}'
            f" {float(count * answers)}"
            for i, count in enumerate(ACCEPTED)
        ]
        return "\n".join(["# HELP something", *lines, "other_total 3", ""])


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200 if self.server.healthy else 503, {})
        elif self.path == "/metrics":
            self._send(200, self.server.metrics())
        else:
            self._send(200, {"data": [{"id": "stub"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        text = f"seed {body.get('seed')}: one two one two"
        choice = {"text": text, "message": {"role": "assistant", "content": text}}
        self._send(200, {"choices": [choice], "usage": {"completion_tokens": 7}})

    def _send(self, status: int, body: Any) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(prefix: str = "atom") -> Iterator[Stub]:
    with Stub(prefix=prefix) as stub:
        thread = threading.Thread(target=stub.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield stub
        finally:
            stub.shutdown()
            thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model")
    parser.add_argument("--prefix", default="atom")
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--never-healthy", action="store_true")
    args = parser.parse_args()
    if args.die:
        sys.exit("no such model")
    Stub(args.port, args.prefix, not args.never_healthy).serve_forever()
