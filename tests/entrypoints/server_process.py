"""A real server in a process of its own, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import psutil
from patience import PATIENCE_SECONDS, wait_until

START_SECONDS = 240.0


class ServerProcess:
    """`python -m atom.entrypoints.openai_server` on a free loopback port.

    Args:
        model: the embedded one when None.
    """

    def __init__(self, model: Path | None, *flags: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "atom.entrypoints.openai_server"]
        fixed = ["--port", "0", "--num-threads", "1"]
        if model is not None:
            fixed += ["--model", str(model), "--kv-cache-memory", "4MiB"]
        self._process = subprocess.Popen(
            [*command, *fixed, *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.log: list[str] = []
        self._url: str | None = None
        self._ready = threading.Event()
        threading.Thread(target=self._read_log, daemon=True).start()

    def wait_ready(self) -> ServerProcess:
        if not self._ready.wait(START_SECONDS) or self._url is None:
            self.stop()
            raise RuntimeError("the server did not start:\n" + "".join(self.log))
        return self

    @property
    def url(self) -> str:
        assert self._url is not None
        return self._url

    @property
    def engine(self) -> psutil.Process:
        (child,) = self.engines
        return child

    @property
    def engines(self) -> list[psutil.Process]:
        """Those of all replicas."""
        return psutil.Process(self._process.pid).children()

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)

    def post(self, path: str, **kwargs: object) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, **kwargs)  # type: ignore[arg-type]

    def metric(self, name: str, headers: dict[str, str] | None = None) -> float:
        text = httpx.get(f"{self.url}/metrics", headers=headers, timeout=60).text
        match = re.search(rf"^atom:{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert match is not None, f"no {name} in {text}"
        return float(match[1])

    def wait_idle(self) -> None:
        """Wait until no sequence lives and no block is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_used_blocks")
        wait_until(lambda: all(self.metric(name) == 0 for name in names))

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_exit(self, seconds: float = PATIENCE_SECONDS) -> int:
        return self._process.wait(seconds)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line)
            if match := re.search(r"Ready: (\S+)", line):
                self._url = match[1]
                self._ready.set()
        self._ready.set()  # it ended
