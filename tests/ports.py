"""Ports that other processes must know before anybody listens on them."""

from __future__ import annotations

import os
import random
import socket

# Below the ports that kernels hand out by themselves, which anybody may get meanwhile.
_FIRST, _PER_WORKER = 20_000, 1_000
_given: set[int] = set()


def free_port() -> int:
    """A loopback port that is given once; each process of a test run has a range of its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw8").removeprefix("gw"))
    first = _FIRST + worker % 9 * _PER_WORKER
    source = random.SystemRandom()
    while True:
        port = source.randrange(first, first + _PER_WORKER)
        if port not in _given and _can_bind(port):
            _given.add(port)
            return port


def _can_bind(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
