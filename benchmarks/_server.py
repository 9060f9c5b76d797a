"""Our server as a child process: started on a free loopback port, always stopped."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ("-m", "atom.entrypoints.openai_server")
# After SIGTERM; then every process of the server is killed.
_STOP_SECONDS = 45.0
_TAIL_CHARACTERS = 2000


class ServerError(RuntimeError):
    """The server ended or did not get ready; the message holds the end of its log."""


class Server:
    """`python -m atom.entrypoints.openai_server FLAGS`, run from the repository's root.

    Use as a context manager: leaving it stops the server, whatever happened inside.

    Args:
        env: the variables of its processes; this one's when None.
    """

    def __init__(
        self, flags: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None
    ) -> None:
        self._port = free_port()
        address = ["--host", "127.0.0.1", "--port", str(self._port)]
        self.command = [sys.executable, *PROGRAM, *flags, *address]
        self._log = log
        self._env = env

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Of the frontend, once started."""
        return self._process.pid

    @property
    def shown(self) -> str:
        """The command as one would type it."""
        return shlex.join(["python", *self.command[1:]])

    def __enter__(self) -> Server:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w", encoding="utf-8") as log:
            # A session of its own: a Ctrl-C here reaches the server as an orderly stop.
            self._process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._env,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):  # the whole session has ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float) -> int | None:
        """The status that it ended with; None if it lives on for so long."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def wait_healthy(self, seconds: float) -> None:
        """Return once /health answers 200.

        Raises:
            ServerError: when the server ends before, or takes longer.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                raise ServerError(f"the server ended with status {status}:\n{self.log_tail()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.2)
        raise ServerError(f"the server was not ready after {seconds:g} s:\n{self.log_tail()}")

    def model(self) -> str:
        """What requests may call the model."""
        answer = httpx.get(f"{self.url}/v1/models", timeout=30).raise_for_status().json()
        return str(answer["data"][0]["id"])

    def log_tail(self) -> str:
        if not self._log.is_file():
            return f"(its log went to {self._log})"
        return self._log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:].strip()


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
