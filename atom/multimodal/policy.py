"""Which images are taken, from where and how large: the operator's rules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from atom.multimodal.addresses import local_literal
from atom.quoting import quote

# Pillow warns of larger ones, and takes no more than twice as much.
MOST_PIXELS = 89_478_485

_HOST = re.compile(r"(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?")


class MediaError(ValueError):
    """An image that is not taken; the message says what was given and what is allowed."""


@dataclass(frozen=True)
class MediaPolicy:
    """What of other machines and of this one may be read, and how much.

    Attributes:
        allowed_hosts: from which images are fetched, `name` (the scheme's own port) or
            `name:port`, as URLs spell them.
        allowed_local_path: the folder below which files may be named; None for nowhere.
        max_bytes: of an encoded image.
        max_pixels: of a decoded one; they take 4 bytes each, and up to 12 while it is decoded.
        fetch_seconds: from the first look at a name to the last byte.

    Raises:
        ValueError: for a host that is none or is an address of a local network, a folder that is
            none, or a limit that cannot be.
    """

    allowed_hosts: tuple[str, ...] = ()
    allowed_local_path: Path | None = None
    max_bytes: int = 20 * 2**20
    max_pixels: int = 50_000_000
    fetch_seconds: float = 10.0

    def __post_init__(self) -> None:
        hosts = tuple(host.lower() for host in self.allowed_hosts)
        for host in hosts:
            match = _HOST.fullmatch(host)
            if match is None or int(match["port"] or 1) not in range(1, 65536):
                raise ValueError(f"expected hosts as NAME or NAME:PORT, got {quote(host)}")
            if local_literal(match["host"].strip("[]")):
                raise ValueError(
                    f"{quote(host)} is an address of a local network, from which nothing is "
                    "fetched; let a server with a public address pass the images on"
                )
        object.__setattr__(self, "allowed_hosts", hosts)
        if self.allowed_local_path is not None:
            if not self.allowed_local_path.is_dir():
                raise ValueError(f"{quote(str(self.allowed_local_path))} is not a folder")
            object.__setattr__(self, "allowed_local_path", self.allowed_local_path.resolve())
        if self.max_bytes < 1:
            raise ValueError(f"the most bytes of an image must be at least 1, got {self.max_bytes}")
        if not 1 <= self.max_pixels <= MOST_PIXELS:
            raise ValueError(
                f"the most pixels of an image must be in [1, {MOST_PIXELS}], got {self.max_pixels}"
            )
        if not 0 < self.fetch_seconds < float("inf"):
            raise ValueError(f"the time to fetch must be above 0 s, got {self.fetch_seconds}")
