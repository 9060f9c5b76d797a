"""Starts the processes of engines.

It imports neither torch nor ZMQ, so that these processes import theirs while this one still imports
what talks to them.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from atom.config import EngineConfig
from atom.model_engine.processes.placement import Placement, place_engines
from atom.model_loader.locate import likely_files

# The path of a Unix socket is limited to about 100 bytes.
_LONGEST_SOCKET_DIR = 80


class EngineProcess(subprocess.Popen[bytes]):
    """Waits for its first message once it has imported its modules; ends when this process does.

    Attributes:
        socket_dir: where its sockets are to be.
    """

    def __init__(self, placement: Placement) -> None:
        self.socket_dir = _make_socket_dir()
        command = [sys.executable, "-m", "atom.model_engine.processes.engine_process"]
        command += ["--socket-dir", str(self.socket_dir), "--name", placement.name]
        if files := likely_files(placement.config.model):
            # From the root on, none looks like an option.
            command += ["--ahead", *(str(path.absolute()) for path in files)]
        if placement.cpus:
            command += ["--cpus", *map(str, placement.cpus)]
        # Ctrl-C is for this process alone; the engine's ignores it once it has begun.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # Never written to: it closes when this process ends, and then the engine process exits.
            super().__init__(command, stdin=subprocess.PIPE, env=placement.environment)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close_pipe(self) -> None:
        if self.stdin is not None:
            self.stdin.close()

    def remove_sockets(self) -> None:
        """Open connections do not need the files."""
        shutil.rmtree(self.socket_dir, ignore_errors=True)


class SpawnedEngines:
    """The processes of a server's engines, until somebody takes them.

    Attributes:
        placements: one for each.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raises:
        ConfigError: as `place_engines`.
        """
        self.placements = place_engines(config)
        self._processes = [EngineProcess(placement) for placement in self.placements]

    def take(self) -> Sequence[EngineProcess]:
        """The processes; whoever takes them ends them."""
        taken, self._processes = self._processes, []
        return taken

    def kill(self) -> None:
        """End those that nobody took."""
        for process in self.take():
            process.kill()
            process.wait()
            process.close_pipe()
            process.remove_sockets()


@contextmanager
def spawned_engines(config: EngineConfig) -> Iterator[SpawnedEngines]:
    """Processes that are ended again if nobody has taken them by the end of the block.

    Raises:
        ConfigError: as `place_engines`.
    """
    engines = SpawnedEngines(config)
    try:
        yield engines
    finally:
        engines.kill()


def _make_socket_dir() -> Path:
    """A directory only this user can enter, with a path short enough for a Unix socket."""
    folder = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(
            prefix="atom-", dir=folder if len(folder.encode()) <= _LONGEST_SOCKET_DIR else "/tmp"
        )
    )
