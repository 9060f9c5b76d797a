from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pictures
import pytest

from atom.multimodal.addresses import Address
from atom.multimodal.fetch import Fetcher
from atom.multimodal.media import MediaLoader
from atom.multimodal.policy import MediaError, MediaPolicy

PUBLIC = ipaddress.ip_address("93.184.216.34")
PNG = pictures.encoded(pictures.gradient())
HOSTS = ("images.example", "odd.example:8080", "127.0.0.1.example")


class Site:
    """A server that says the same to everybody, and how it was reached."""

    def __init__(self, *pieces: bytes, pause: float = 0.0) -> None:
        self.requests: list[bytes] = []
        self.reached: list[tuple[str, int]] = []
        self.resolved: list[str] = []
        self._pieces, self._pause = pieces, pause
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.requests.append(connection.recv(65536))
                try:
                    for piece in self._pieces:
                        connection.sendall(piece)
                        time.sleep(self._pause)
                except OSError:
                    continue

    def stop(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def resolve(self, host: str, port: int) -> list[Address]:
        del port
        self.resolved.append(host)
        return [PUBLIC]

    def connect(self, address: Address, port: int, timeout: float) -> socket.socket:
        self.reached.append((str(address), port))
        return socket.create_connection(self._socket.getsockname(), timeout)

    def fetcher(self, **limits: float) -> Fetcher:
        policy = MediaPolicy(allowed_hosts=HOSTS, **limits)  # type: ignore[arg-type]
        return Fetcher(policy, self.resolve, self.connect)


@contextmanager
def site(*pieces: bytes, pause: float = 0.0) -> Iterator[Site]:
    it = Site(*pieces, pause=pause)
    try:
        yield it
    finally:
        it.stop()


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_an_image_is_fetched_from_the_address_that_was_looked_at() -> None:
    with site(answer(PNG)) as there:
        loader = MediaLoader(MediaPolicy(), there.fetcher())
        assert loader.load("http://Images.example/a/b.png?c=d#e").size == (7, 5)
    assert there.resolved == ["images.example"]
    assert there.reached == [(str(PUBLIC), 80)]
    head = there.requests[0].decode().split("\r\n")
    assert head[:2] == ["GET /a/b.png?c=d HTTP/1.1", "Host: Images.example"]


def test_ports_are_allowed_by_name() -> None:
    with site(answer(PNG)) as there:
        fetcher = there.fetcher()
        assert fetcher.read("http://odd.example:8080/x") == PNG
        assert fetcher.read("http://images.example:80/x") == PNG
        for url in ("http://odd.example/x", "http://images.example:8080/x"):
            with pytest.raises(MediaError, match="images are not fetched from"):
                fetcher.read(url)
    assert there.reached == [(str(PUBLIC), 8080), (str(PUBLIC), 80)]


def test_chunks_are_read() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += b"%x\r\n%b\r\n0\r\n\r\n" % (len(PNG), PNG)
    with site(chunked) as there:
        assert there.fetcher().read("http://images.example/x") == PNG


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x",
        "http://2130706433/x",
        "http://0x7f000001/x",
        "http://0177.0.0.1/x",
        "http://127.1/x",
        "http://[::1]/x",
        "http://[::ffff:127.0.0.1]/x",
        "http://[fe80::1%25eth0]/x",
        "http://169.254.169.254/latest/meta-data",
        "http://localhost/x",
        "http://images.example./x",
        "http://images.example.evil.test/x",
        "http://sub.images.example/x",
        "http://images.example@127.0.0.1/x",
        "http://127.0.0.1@images.example/x",
        "http://user:password@images.example/x",
        "http://127.0.0.1\\@images.example/x",
        "http://images.example\\@127.0.0.1/x",
        "http://127.0.0.1#@images.example/x",
        "http://127.0.0.1?@images.example/x",
        "http:/images.example/x",
        "http:images.example/x",
        "http:///images.example/x",
        "http://images.example:99999/x",
        "http://images.example:80:80/x",
        "http://images。example/x",
        "http://images.example/\r\nHost: other",
        "http://images.example/ x",
        "http://images.example\t/x",
        "http://[images.example]/x",
    ],
)
def test_other_spellings_reach_nothing(url: str) -> None:
    with site(answer(PNG)) as there, pytest.raises(MediaError) as caught:
        there.fetcher().read(url)
    assert there.resolved == there.reached == there.requests == []
    assert len(str(caught.value)) < 500


def test_without_allowed_hosts_nothing_is_fetched() -> None:
    with pytest.raises(MediaError, match="fetches no images: send a data: URL, or start it with"):
        MediaLoader(MediaPolicy()).load("https://images.example/x")


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "::1", "::ffff:10.0.0.1"])
def test_names_that_mean_a_local_address(address: str) -> None:
    """Also beside a public one."""
    addresses = [PUBLIC, ipaddress.ip_address(address)]
    with site(answer(PNG)) as there:
        fetcher = Fetcher(there.fetcher().policy, lambda _host, _port: addresses, there.connect)
        with pytest.raises(MediaError, match="has an address that is not of the public internet"):
            fetcher.read("http://127.0.0.1.example/x")
    assert there.reached == []


def test_names_without_address() -> None:
    def resolve(host: str, port: int) -> list[Address]:
        raise socket.gaierror(f"{host}:{port}")

    with pytest.raises(MediaError, match="has no address"):
        Fetcher(MediaPolicy(allowed_hosts=HOSTS), resolve).read("http://images.example/x")


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (
            answer(b"", "Location: http://127.0.0.1/", status="302 Found"),
            "redirects, which is not followed",
        ),
        (answer(PNG, status="404 Not Found"), "answers with status 404"),
        (answer(PNG, status="206 Partial Content"), "answers with status 206"),
        (answer(PNG, "Content-Encoding: gzip"), "compressed"),
        (answer(PNG)[:-5], "ended 5 bytes early|cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", "more than the 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(2000), "more than the 1000 bytes"),
        (b"not HTTP\r\n\r\n", "cannot be fetched"),
        (b"", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\nX: " + bytes(70000), "cannot be fetched"),
    ],
)
def test_answers_that_are_no_image(response: bytes, said: str) -> None:
    with site(response) as there, pytest.raises(MediaError, match=said):
        there.fetcher(max_bytes=1000).read("http://images.example/x")
    assert len(there.requests) == 1


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_all_ends_in_time(head: bytes) -> None:
    """Also where a byte comes now and then: each would begin another wait."""
    drops = [head, *500 * [b"x"]]
    start = time.monotonic()
    with site(*drops, pause=0.05) as there:
        fetcher = there.fetcher(fetch_seconds=0.3)
        with pytest.raises(MediaError, match=r"longer than the 0.3"):
            fetcher.read("http://images.example/x")
    assert time.monotonic() - start < 20  # 25 s of drops


def test_tls_asks_for_the_name() -> None:
    """The certificate has to be the name's, which goes out in the first message."""
    with site(b"") as there, pytest.raises(MediaError, match="cannot be fetched"):
        there.fetcher().read("https://images.example/x")
    assert there.reached == [(str(PUBLIC), 443)]
    assert there.requests[0][:1] == b"\x16"  # a handshake
    assert b"images.example" in there.requests[0]
