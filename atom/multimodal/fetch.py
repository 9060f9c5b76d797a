"""Images of other machines: fetched from allowed hosts, at public addresses, without redirects."""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from atom.multimodal.addresses import Address, is_public
from atom.multimodal.policy import MediaError, MediaPolicy
from atom.quoting import quote

_PORTS = {"http": 80, "https": 443}
_PIECE = 2**16
# Anything else than these in a URL is read differently by different programs.
_URL = re.compile(r"[!-~]+")
_BACKSLASH = "\\"


def _resolve(host: str, port: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


def _connect(address: Address, port: int, timeout: float) -> socket.socket:
    return socket.create_connection((str(address), port), timeout)


@dataclass(frozen=True)
class Fetcher:
    """Reads images over HTTP, in the calling thread.

    A name is resolved once, all of its addresses have to be public, and the connection goes to
    one of those that were looked at: a name cannot mean another machine a moment later. Proxies
    of the environment are not used, which would resolve names themselves.

    Attributes:
        resolve: the addresses of a host and port.
        connect: to an address and port, within so many seconds.
    """

    policy: MediaPolicy
    resolve: Callable[[str, int], list[Address]] = _resolve
    connect: Callable[[Address, int, float], socket.socket] = _connect

    def read(self, url: str) -> bytes:
        """The body that a URL stands for.

        Raises:
            MediaError: for a URL that is not allowed, and whatever goes wrong on the way.
        """
        deadline = time.monotonic() + self.policy.fetch_seconds
        parts, port = self._checked(url)
        addresses = self._addresses(parts, port)
        try:
            return self._get(parts, port, addresses, deadline)
        except MediaError:
            raise
        except TimeoutError:
            raise MediaError(
                f"{quote(url)} took longer than the {self.policy.fetch_seconds:g} s that there are"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise MediaError(f"{quote(url)} cannot be fetched: {quote(str(error))}") from None

    def _checked(self, url: str) -> tuple[SplitResult, int]:
        """Raises MediaError for all but an allowed host's plain URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise MediaError(f"{quote(url)} is not a URL: {error}") from None
        if not _URL.fullmatch(url) or _BACKSLASH in url or not parts.hostname:
            raise MediaError(f"{quote(url)} is not a URL of printable ASCII with a host")
        if "@" in parts.netloc:
            raise MediaError(f"{quote(url)} names a user, which URLs of images cannot")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        own = _PORTS[parts.scheme]
        names = {f"{host}:{port or own}"} | ({host} if port in (None, own) else set())
        allowed = self.policy.allowed_hosts
        if names.isdisjoint(allowed):
            if not allowed:
                raise MediaError(
                    "this server fetches no images: send a data: URL, or start it with "
                    "--allowed-media-hosts"
                )
            raise MediaError(
                f"images are not fetched from {quote(parts.netloc)}; --allowed-media-hosts of this "
                f"server are {', '.join(allowed)}"
            )
        return parts, port or own

    def _addresses(self, parts: SplitResult, port: int) -> list[Address]:
        host = parts.hostname or ""
        try:
            addresses = self.resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise MediaError(f"the host {quote(host)} has no address: {error}") from None
        wrong = [address for address in addresses if not is_public(address)]
        if wrong or not addresses:
            raise MediaError(
                f"the host {quote(host)} has an address that is not of the public internet; "
                "nothing is fetched from there"
            )
        return addresses

    def _connected(self, addresses: list[Address], port: int, deadline: float) -> socket.socket:
        """To the first of them that answers."""
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return self.connect(address, port, _left(deadline) / len(addresses))
        return self.connect(addresses[-1], port, _left(deadline))

    def _get(
        self, parts: SplitResult, port: int, addresses: list[Address], deadline: float
    ) -> bytes:
        host = parts.hostname or ""
        with contextlib.ExitStack() as stack:
            sock = self._connected(addresses, port, deadline)
            stack.callback(sock.close)
            if parts.scheme == "https":
                sock.settimeout(_left(deadline))
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
                stack.callback(sock.close)
            connection = http.client.HTTPConnection(host, port)
            # What `connection` needs of a socket, with the time that is left at each call.
            connection.sock = _Timed(sock, deadline)
            stack.callback(connection.close)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.putrequest("GET", target, skip_host=True, skip_accept_encoding=True)
            connection.putheader("Host", parts.netloc)
            connection.putheader("Accept", "image/*")
            connection.putheader("Accept-Encoding", "identity")
            connection.putheader("Connection", "close")
            connection.endheaders()
            return self._body(connection.getresponse(), parts)

    def _body(self, response: http.client.HTTPResponse, parts: SplitResult) -> bytes:
        url, most = quote(parts.geturl()), self.policy.max_bytes
        if 300 <= response.status < 400:
            raise MediaError(f"{url} redirects, which is not followed; send the last URL")
        if response.status != 200:
            raise MediaError(f"{url} answers with status {response.status}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise MediaError(f"{url} answers with a compressed body, which was not asked for")
        too_large = MediaError(f"{url} has more than the {most} bytes that an image may have")
        if response.length is not None and response.length > most:
            raise too_large
        pieces: list[bytes] = []
        size = 0
        for piece in _pieces(response):
            size += len(piece)
            if size > most:
                raise too_large
            pieces.append(piece)
        if response.length:
            raise MediaError(f"{url} ended {response.length} bytes early")
        return b"".join(pieces)


def _pieces(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while piece := response.read(_PIECE):
        yield piece


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Timed:
    """A connected socket whose every call ends by a deadline, `time.monotonic()`."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def sendall(self, data: Any) -> None:
        self._sock.settimeout(_left(self._deadline))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        del mode
        return io.BufferedReader(_Received(self._sock, self._deadline))

    def close(self) -> None:
        """Nothing: `http.client` closes its end before the answer is read."""


class _Received(io.RawIOBase):
    """What a socket receives."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_left(self._deadline))
        return self._sock.recv_into(buffer)
