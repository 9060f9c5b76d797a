"""The socket that a server listens on."""

from __future__ import annotations

import contextlib
import os
import socket
import stat


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: nobody connects before the model is loaded.

    Raises:
        OSError: when the address does not exist or the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # Not refused because of the last server's connections that linger in the kernel.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def bind_uds(path: str) -> socket.socket:
    """A Unix domain socket that does not listen yet; one that a dead server left is replaced.

    Raises:
        OSError: when the path cannot be bound, or a server listens on it.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _listens(path):
                os.unlink(path)
        sock.bind(path)
    except OSError:
        sock.close()
        raise
    return sock


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            return False
        return True
