"""What a server holds: processes, threads, files, sockets, shared memory, blocks, requests."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from _chaos.patience import patient

# Memory that a server may have more than at first: allocators keep what they had at the peak.
_RSS_SHARE, _RSS_BYTES = 1.25, 64 * 2**20
_SETTLE_SECONDS = 60.0


@dataclass(frozen=True)
class Held:
    """Of all processes of a server together.

    Attributes:
        shared: mappings of shared memory.
        temporary: files in the server's own temporary folder.
        running, waiting, blocks: what /metrics says; None where it cannot be asked.
    """

    processes: int
    threads: int
    files: int
    sockets: int
    shared: int
    temporary: int
    rss: int
    running: float | None = None
    waiting: float | None = None
    blocks: float | None = None

    def excess(self, before: Held) -> dict[str, tuple[float, float]]:
        """What there is more of than `before`, each with both numbers; requests and blocks that are
        held at all.
        """
        wrong: dict[str, tuple[float, float]] = {}
        for field in dataclasses.fields(self):
            now, then = getattr(self, field.name), getattr(before, field.name)
            if field.name in ("running", "waiting", "blocks"):
                most = 0.0
            elif field.name == "rss":
                most = then * _RSS_SHARE + _RSS_BYTES
            else:
                most = then
            if now is not None and now > most:
                wrong[field.name] = (then, now)
        return wrong


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that it started, as far as they live."""
    try:
        root = psutil.Process(pid)
        found = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def metrics(url: str) -> dict[str, float]:
    """Of /metrics, those without labels, and sums over the labels of those with them."""
    text = httpx.get(f"{url}/metrics", timeout=patient(30)).raise_for_status().text
    found: dict[str, float] = {}
    for name, value in re.findall(r"^atom:(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def held(pid: int, url: str | None, temporary: Path) -> Held:
    """Args:
    url: None where the server cannot be asked.
    """
    processes = threads = files = sockets = shared = rss = 0
    for process in tree(pid):
        try:
            names = _open_files(process.pid)
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            threads += process.num_threads()
            rss += process.memory_info().rss
        except (OSError, psutil.NoSuchProcess):
            continue  # it has ended meanwhile
        processes += 1
        files += len(names)
        sockets += sum(name.startswith("socket:") for name in names)
        shared += sum("/dev/shm/" in line or "memfd:" in line for line in maps.splitlines())
    asked = metrics(url) if url is not None else {}
    return Held(
        processes,
        threads,
        files,
        sockets,
        shared,
        sum(1 for _ in temporary.rglob("*")),
        rss,
        asked.get("num_requests_running"),
        asked.get("num_requests_waiting"),
        asked.get("kv_cache_used_blocks"),
    )


def _open_files(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    names = []
    for number in os.listdir(folder):
        try:
            names.append(os.readlink(folder / number))
        except OSError:
            continue
    return names


async def settle(pid: int, url: str, temporary: Path, before: Held | None) -> Held:
    """What the server holds once that is no more than `before`, or after a minute; without
    `before`, once no request lives.
    """
    deadline = time.monotonic() + patient(_SETTLE_SECONDS)
    while True:
        now = await asyncio.to_thread(held, pid, url, temporary)
        if not now.excess(before or now) or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.5)
