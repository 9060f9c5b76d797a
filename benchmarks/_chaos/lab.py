"""What all phases share: the requests, their right answers, servers, and the record of it all."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from _server import Server

from _chaos.clients import PLAIN, Client, Outcome, ask_once, run_client
from _chaos.patience import Stops, patient
from _chaos.plan import Ask, make_picture
from _chaos.watch import Held, metrics, settle, tree

START_SECONDS = 600.0
# A process whose pipe closed, or that was asked to end.
END_SECONDS = 30.0
# More images at once than a server reads, and their pixels: reading one takes longer than sending.
_READERS, _LARGE = 24, (3000, 3000)
# After so long without work an engine has given back what it does not use.
_IDLE_SECONDS = 2.0

# Says of an outcome without an answer whether the phase's faults explain it.
Allows = Callable[[Outcome], bool]


@dataclass
class Record:
    """One phase: what was done, what came of it, and what is wrong."""

    name: str
    command: str = ""
    seconds: float = 0.0
    load: float = 0.0
    results: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    events: list[str] = field(default_factory=list)
    held: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def note(self, event: str) -> None:
        self.events.append(event)

    def blame(self, what: str) -> None:
        self.wrong.append(what)

    def expect(self, is_so: bool, what: str) -> None:
        """Note what was found, as wrong where it is not so."""
        if is_so:
            self.note(what)
        else:
            self.blame(f"NOT SO: {what}")

    @property
    def num_requests(self) -> int:
        return sum(self.results.values())

    def as_dict(self) -> dict[str, Any]:
        results = [[fault, result, n] for (fault, result), n in sorted(self.results.items())]
        return {
            **asdict(self),
            "results": results,
            "kinds": dict(self.kinds),
            "requests": self.num_requests,
        }


class Running:
    """A server that a phase has started.

    Args:
        temporary: the folder that its processes use for temporary files.
    """

    def __init__(self, server: Server, temporary: Path) -> None:
        self.server, self.temporary = server, temporary

    @property
    def port(self) -> int:
        return int(self.server.url.rpartition(":")[2])

    @property
    def engines(self) -> list[int]:
        """Process ids of the engines: the children that the server started itself."""
        own = tree(self.server.pid)
        return [p.pid for p in own[1:] if p.ppid() == self.server.pid]

    @property
    def descendants(self) -> list[int]:
        return [p.pid for p in tree(self.server.pid)]

    def metrics(self) -> dict[str, float]:
        return metrics(self.server.url)

    async def settle(self, before: Held | None = None) -> Held:
        return await settle(self.server.pid, self.server.url, self.temporary, before)


class Lab:
    """Args:
    flags: of every server under test.
    quiet_flags: of the server whose answers are right.
    """

    def __init__(
        self,
        asks: Sequence[Ask],
        flags: Sequence[str],
        quiet_flags: Sequence[str],
        folder: Path,
        seed: int,
    ) -> None:
        self.asks = list(asks)
        self.rng = random.Random(seed)
        self._flags, self._quiet_flags = list(flags), list(quiet_flags)
        self._folder = folder
        self._right: dict[int, Any] = {}
        self._num_servers = 0
        self.stops = Stops()

    @asynccontextmanager
    async def server(
        self,
        *flags: str,
        quiet: bool = False,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Running]:
        """A server that is ready, which is stopped at the end, whatever state it is in."""
        self._num_servers += 1
        temporary = self._folder / f"tmp-{self._num_servers}"
        temporary.mkdir()
        log = log or self._folder / f"server-{self._num_servers}.log"
        variables = {**os.environ, "TMPDIR": str(temporary), **(env or {})}
        base = self._quiet_flags if quiet else self._flags
        with Server([*base, *flags], log, env=variables) as server:
            await asyncio.to_thread(server.wait_healthy, patient(START_SECONDS))
            yield Running(server, temporary)

    async def learn(self) -> None:
        """Ask a quiet server for the right answer of each request, one after another.

        Raises:
            RuntimeError: when it refuses one: then the plan is wrong.
        """
        async with self.server(quiet=True) as running:
            for ask in self.asks:
                outcome = await ask_once(running.port, ask)
                if outcome.said is None:
                    raise RuntimeError(f"{ask.kind} {ask.body}: {outcome.error}")
                self._right[ask.number] = outcome.said

    async def warm_up(self, running: Running, at_once: int = 28) -> Held:
        """Let a server answer each kind of request, `at_once` of them -> what it holds then.

        Raises:
            RuntimeError: when it does not answer one: then it has not met its kind.
        """
        rng = random.Random(0)
        room = asyncio.Semaphore(at_once)

        async def meet(ask: Ask) -> None:
            async with room:
                (outcome,) = await run_client(PLAIN, running.port, [ask], rng)
            if outcome.said is None:
                raise RuntimeError(f"warm-up, {ask.kind}: {outcome.status} {outcome.error}")

        await asyncio.gather(*(meet(ask) for ask in self.asks[:28]))
        if any(ask.sees for ask in self.asks):
            await asyncio.to_thread(_occupy_readers, running.server.url)
        await running.settle()
        # Connections that nobody uses are closed, and idle helpers end.
        await asyncio.sleep(3)
        return await running.settle()

    async def load(
        self,
        record: Record,
        port: int,
        count: int,
        num_clients: int,
        clients: Sequence[tuple[Client, int]] = (PLAIN,),
        allows: Allows | None = None,
        asks: Sequence[Ask] | None = None,
    ) -> list[Outcome]:
        """Send `count` requests, of `asks` or of all, by so many clients at a time, and judge what
        comes back.
        """
        choices = asks or self.asks
        left = count
        outcomes: list[Outcome] = []

        async def work(seed: int) -> None:
            nonlocal left
            rng = random.Random(seed)
            while left > 0:
                client = rng.choice(clients)
                left -= client[1]
                chosen = [rng.choice(choices) for _ in range(client[1])]
                came = await run_client(client, port, chosen, rng)
                self.judge(record, came, allows)
                outcomes.extend(came)

        await asyncio.gather(*(work(self.rng.randrange(2**31)) for _ in range(num_clients)))
        return outcomes

    def judge(self, record: Record, outcomes: Sequence[Outcome], allows: Allows | None) -> None:
        for outcome in outcomes:
            result = self._judge(outcome, allows)
            record.results[outcome.fault, result] += 1
            record.kinds[outcome.ask.kind] += 1
            if result.startswith("WRONG"):
                record.blame(self._describe(outcome, result))

    def _judge(self, outcome: Outcome, allows: Allows | None) -> str:
        if outcome.left:
            return "left"
        if outcome.said is not None:
            return "right" if outcome.said == self._right[outcome.ask.number] else "WRONG answer"
        if outcome.error != "HUNG" and allows is not None and allows(outcome):
            status = "cut" if outcome.status in (None, 200) else str(outcome.status)
            return f"failed as it may ({status})"
        if self.stops.met(outcome.started, outcome.started + outcome.seconds):
            return "failed while everything was stopped from outside"
        return "WRONG: no answer"

    def _describe(self, outcome: Outcome, result: str) -> str:
        ask = outcome.ask
        text = f"{result}: {outcome.fault}, {ask.kind} {ask.number} {ask.body}"
        if outcome.said is not None:
            return f"{text}\n  said  {outcome.said}\n  right {self._right[ask.number]}"
        return f"{text}: {outcome.status} {outcome.error}"


def _occupy_readers(url: str) -> None:
    """Let a server read so many large images at once that all threads for that are started."""
    data = make_picture(*_LARGE, bytes(3 * math.prod(_LARGE)))
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    content = json.dumps({"messages": [{"role": "user", "content": [part]}]})
    headers = {"content-type": "application/json"}

    def read(_: int) -> None:
        answer = httpx.post(
            f"{url}/tokenize", content=content, headers=headers, timeout=patient(60)
        )
        answer.raise_for_status()

    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(read, range(_READERS)))


async def check_held(record: Record, running: Running, before: Held) -> None:
    """Record what a server holds once it is idle again, and what of it is too much."""
    await running.settle(before)
    await asyncio.sleep(_IDLE_SECONDS)
    after = await running.settle(before)
    record.held.append({"before": asdict(before), "after": asdict(after)})
    for name, (then, now) in after.excess(before).items():
        record.blame(f"{name} did not come back: {then:g} before, {now:g} after")


async def wait_gone(pids: Sequence[int]) -> list[int]:
    """Wait until processes have ended -> those that live on."""
    deadline = time.monotonic() + patient(END_SECONDS)
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if tree(pid)]
        await asyncio.sleep(0.1)
    return left
