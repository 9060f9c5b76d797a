"""The phases of a run: each starts the servers that it harms, and says what it expects of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import httpx
import psutil

from _chaos.clients import PATIENCE_SECONDS, PLAIN, SLOW, VANISHING, Outcome, run_client
from _chaos.clock import JumpingClock
from _chaos.lab import END_SECONDS, Lab, Record, Running, check_held, wait_gone
from _chaos.patience import patient
from _chaos.watch import Held, tree

_CLIENTS = 24
# An engine that is silent for so long is unhealthy; some more for a busy machine.
_STOPPED_SECONDS = 14.0
# Of sequences that run, and of those that wait.
_OVERLOAD_RUNNING, _OVERLOAD_WAITING = 4, 8
_OVERLOAD_CLIENTS = 10 * (_OVERLOAD_RUNNING + _OVERLOAD_WAITING)
# Seconds: forward by more than any timeout, back before the start, past 32 bits, and as it is.
_CLOCK_SHIFTS = (7_200, -86_400, 20 * 365 * 86_400, 0)
_SECONDS_BEFORE_A_JUMP = 0.1
# Between when a server looks at its clock and when this program does.
_CLOCK_SLACK = 600.0
# Requests after which a server has all the memory that it ever needs, but for so much.
_GROWN_REQUESTS, _MOST_GROWTH = 1000, 1.01
# What has to happen under load, or right answers say little.
_COUNTED = {
    "preemptions_total": "preemptions",
    "prefix_cache_hits_total": "tokens of prompts found in the prefix cache",
    "mm_cache_hits_total": "images found encoded",
}
# What a squeezed engine may map beyond what it has.
_SQUEEZED_BYTES = 24 * 2**20


async def _steady(lab: Lab, record: Record, running: Running, before: Held, count: int) -> None:
    """Clients that behave, more than fit in the KV cache."""
    start = running.metrics()
    # Whatever the others are, more of these run at once than the cache holds at their ends.
    growing = [ask for ask in lab.asks if ask.grows]
    await lab.load(record, running.port, count - count // 2, _CLIENTS, asks=growing)
    await lab.load(record, running.port, count // 2, _CLIENTS)
    await check_held(record, running, before)
    end = running.metrics()
    for name, what in _COUNTED.items():
        # Without images there are no counts of them.
        if name in end:
            times = end[name] - start.get(name, 0)
            record.expect(times > 0, f"{what}: {times:g}")


async def _vanish(lab: Lab, record: Record, running: Running, before: Held, count: int) -> None:
    """Clients that go away at every stage, beside some that wait."""
    await lab.load(record, running.port, count, _CLIENTS, (VANISHING, VANISHING, PLAIN))
    await check_held(record, running, before)


async def _slow(lab: Lab, record: Record, running: Running, before: Held, count: int) -> None:
    """Clients that send and read slowly, reuse connections, and pipeline."""
    await lab.load(record, running.port, count, _CLIENTS, (*SLOW, PLAIN))
    await check_held(record, running, before)


async def _freeze(lab: Lab, record: Record, running: Running, before: Held, count: int) -> None:
    """SIGSTOP of the engine until it counts as unhealthy, then SIGCONT."""
    (engine,) = running.engines
    work = asyncio.create_task(lab.load(record, running.port, count, _CLIENTS, allows=_unavailable))
    await asyncio.sleep(1)
    os.kill(engine, signal.SIGSTOP)
    record.note(f"SIGSTOP of the engine for {_STOPPED_SECONDS:g} s")
    try:
        await asyncio.sleep(_STOPPED_SECONDS)
        status = await _health(running)
        record.expect(status == 503, f"/health of a stopped engine is {status}")
    finally:
        os.kill(engine, signal.SIGCONT)
    await work
    await _wait_healthy(running)
    await lab.load(record, running.port, _CLIENTS, _CLIENTS)
    await check_held(record, running, before)


SHARED: dict[str, Callable[[Lab, Record, Running, Held, int], Coroutine[Any, Any, None]]] = {
    "steady": _steady,
    "vanish": _vanish,
    "slow": _slow,
    "freeze": _freeze,
}


async def _overload(lab: Lab, record: Record, count: int) -> None:
    """Ten times as many clients as the engine and its queue have room for."""
    flags = ["--max-num-seqs", str(_OVERLOAD_RUNNING)]
    flags += ["--max-waiting-requests", str(_OVERLOAD_WAITING)]
    async with lab.server(*flags) as running:
        record.command = running.server.shown
        before = await lab.warm_up(running, _OVERLOAD_RUNNING)
        outcomes = await lab.load(
            record, running.port, count, _OVERLOAD_CLIENTS, allows=_queue_is_full
        )
        refused = [o for o in outcomes if o.status == 429]
        waits = sorted({int(o.headers.get("retry-after", -1)) for o in refused})
        record.expect(bool(refused) and min(waits) >= 1, f"429 with Retry-After of {waits} s")
        await check_held(record, running, before)


async def _kill(lab: Lab, record: Record, count: int) -> None:
    """kill -9 of an engine beside another, of the compiler of grammars, and of a lone server."""
    async with lab.server("--data-parallel-size", "2") as running:
        record.command = running.server.shown
        before = await lab.warm_up(running)
        work = asyncio.create_task(
            lab.load(record, running.port, count, _CLIENTS, allows=_unavailable)
        )
        await asyncio.sleep(1)
        victim = running.engines[0]
        os.kill(victim, signal.SIGKILL)
        record.note("kill -9 of one of two engines")
        await work
        deadline = time.monotonic() + patient(300)
        healthy = restarts = 0.0
        # The server may not have noticed yet.
        while (restarts < 1 or healthy < 2) and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            asked = running.metrics()
            healthy, restarts = asked["replica_healthy"], asked["replica_restarts_total"]
        record.expect(restarts >= 1, f"{restarts:g} engine was started again")
        await lab.load(record, running.port, _CLIENTS, _CLIENTS)
        await _kill_compilers(lab, record, running)
        await lab.warm_up(running)
        await check_held(record, running, before)
        own = running.descendants
        os.kill(running.server.pid, signal.SIGKILL)
        left = await wait_gone([pid for pid in own if pid != running.server.pid])
        record.expect(not left, "kill -9 of the server ended its engines, too")
    async with lab.server() as running:
        work = asyncio.create_task(
            lab.load(record, running.port, _CLIENTS, _CLIENTS, allows=_unavailable)
        )
        await asyncio.sleep(0.5)
        own = running.descendants
        os.kill(running.engines[0], signal.SIGKILL)
        await work
        left = await wait_gone(own)
        status = running.server.wait(patient(END_SECONDS))
        record.expect(
            status == 1 and not left, f"kill -9 of a lone engine ended the server with {status}"
        )
        _check_temporary(record, running)


async def _kill_compilers(lab: Lab, record: Record, running: Running) -> None:
    engines = running.engines
    compilers = [p.pid for e in engines for p in tree(e)[1:]]
    for pid in compilers:
        os.kill(pid, signal.SIGKILL)
    record.note(f"kill -9 of {len(compilers)} processes that compile grammars")
    asks = [ask for ask in lab.asks if ask.is_constrained]
    rng = random.Random(0)
    came = await asyncio.gather(*(run_client(PLAIN, running.port, [ask], rng) for ask in asks))
    lab.judge(record, [o for outcomes in came for o in outcomes], None)
    record.expect(running.engines == engines, "no engine ended with them")


async def _term(lab: Lab, record: Record, count: int) -> None:
    """SIGTERM while requests run: they end, and then the server does."""
    async with lab.server("--drain-seconds", "300") as running:
        record.command = running.server.shown
        rng = random.Random(1)
        asks = [lab.rng.choice(lab.asks) for _ in range(min(count, 200))]
        work = [asyncio.create_task(run_client(PLAIN, running.port, [ask], rng)) for ask in asks]
        await asyncio.sleep(1)
        own = running.descendants
        os.kill(running.server.pid, signal.SIGTERM)
        record.note(f"SIGTERM with {sum(not w.done() for w in work)} requests under way")
        await asyncio.sleep(0.2)
        late = await lab.load(record, running.port, 8, 8, allows=_unavailable_or_closed)
        record.expect(all(o.said is None for o in late), "nothing was taken after it")
        for outcomes in await asyncio.gather(*work):
            lab.judge(record, outcomes, None)
        left = await wait_gone(own)
        status = running.server.wait(patient(END_SECONDS))
        record.expect(status == 0 and not left, f"the server ended with {status}")
        _check_temporary(record, running)


async def _disk(lab: Lab, record: Record, count: int) -> None:
    """Nothing more can be written: a log that is full, then files that may not grow."""
    async with lab.server(log=Path("/dev/full")) as running:
        record.command = running.server.shown
        record.note("the log is /dev/full: every write of it fails")
        before = await lab.warm_up(running)
        await lab.load(record, running.port, count // 2, _CLIENTS)
        for pid in running.descendants:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        record.note("RLIMIT_FSIZE 0: no process can write to a file")
        await lab.load(record, running.port, count - count // 2, _CLIENTS)
        await check_held(record, running, before)


async def _memory(lab: Lab, record: Record, count: int) -> None:
    """An engine that gets little more memory than it has, for some seconds."""
    async with lab.server() as running:
        record.command = running.server.shown
        before = await lab.warm_up(running)
        (engine,) = running.engines
        mapped = psutil.Process(engine).memory_info().vms
        resource.prlimit(engine, resource.RLIMIT_AS, (mapped + _SQUEEZED_BYTES, -1))
        record.note(f"RLIMIT_AS of the engine: {_SQUEEZED_BYTES >> 20} MiB more than it has")
        await lab.load(record, running.port, count, _CLIENTS, allows=_any_error)
        if running.server.is_alive:
            resource.prlimit(engine, resource.RLIMIT_AS, (-1, -1))
            record.note("the engine lived on")
            await _wait_healthy(running)
            await lab.load(record, running.port, _CLIENTS, _CLIENTS)
            await check_held(record, running, before)
        else:
            status = running.server.wait(patient(END_SECONDS))
            record.expect(status == 1, f"the server ended with {status}")


async def _clock(lab: Lab, record: Record, count: int) -> None:
    """The wall clock of all processes jumps while requests run, by hours and by years."""
    with tempfile.TemporaryDirectory(prefix="atom-chaos-clock-") as folder:
        clock = JumpingClock(Path(folder))
        async with lab.server(env=clock.env) as running:
            record.command = running.server.shown
            before = await lab.warm_up(running)
            statuses = []
            for shift in _CLOCK_SHIFTS:
                share = -(-count // len(_CLOCK_SHIFTS))
                work = asyncio.create_task(lab.load(record, running.port, share, _CLIENTS))
                await asyncio.sleep(_SECONDS_BEFORE_A_JUMP)
                clock.jump(shift)
                told = await _created(running)
                statuses.append(await _health(running))
                off = told - time.time() - shift
                record.expect(abs(off) < _CLOCK_SLACK, f"the clock is {shift:+d} s off")
                await work
            record.expect(set(statuses) == {200}, f"/health meanwhile is {set(statuses)}")
            await check_held(record, running, before)


async def _created(running: Running) -> float:
    """What time a server believes it is."""
    async with httpx.AsyncClient() as client:
        body = {"prompt": "a", "max_tokens": 1}
        url = f"{running.server.url}/v1/completions"
        answer = await client.post(url, json=body, timeout=patient(PATIENCE_SECONDS))
        return float(answer.raise_for_status().json()["created"])


ALONE: dict[str, Callable[[Lab, Record, int], Coroutine[Any, Any, None]]] = {
    "overload": _overload,
    "kill": _kill,
    "term": _term,
    "disk": _disk,
    "memory": _memory,
    "clock": _clock,
}
# Of all requests.
SHARES = {
    "steady": 0.2,
    "vanish": 0.2,
    "slow": 0.1,
    "freeze": 0.05,
    "overload": 0.3,
    "kill": 0.05,
    "term": 0.02,
    "disk": 0.04,
    "memory": 0.04,
    "clock": 0.04,
}


async def run_phases(
    lab: Lab,
    names: list[str],
    rounds: Iterable[int],
    note: Callable[[Record], None],
) -> None:
    """Run all phases once a round; those that leave a server whole share one through all rounds.

    Args:
        rounds: the requests of each.
        note: told of each phase at its end.
    """
    whole = sum(SHARES[name] for name in names)
    async with contextlib.AsyncExitStack() as stack:
        shared: tuple[Running, Held] | None = None
        growth = Growth()
        for count in rounds:
            for name in names:
                size = max(round(count * SHARES[name] / whole), 4)
                record = Record(name, load=os.getloadavg()[0])
                if name in ALONE:
                    work = ALONE[name](lab, record, size)
                else:
                    if shared is None:
                        running = await stack.enter_async_context(lab.server())
                        shared = running, await lab.warm_up(running)
                    record.command = shared[0].server.shown
                    work = SHARED[name](lab, record, *shared, size)
                await _finish(record, work)
                note(record)
                if name in SHARED:
                    growth.follow(record)
    if growth.record is not None:
        note(growth.record)


class Growth:
    """Whether the server that lives through all rounds grows once it has met many requests.

    Attributes:
        record: None before that.
    """

    def __init__(self) -> None:
        self.record: Record | None = None
        self._num_requests = 0
        self._warm: tuple[int, int] | None = None

    def follow(self, phase: Record) -> None:
        """Take in a phase of that server."""
        self._num_requests += phase.num_requests
        if not phase.held or self._num_requests < _GROWN_REQUESTS:
            return
        now = phase.held[-1]["after"]["rss"]
        if self._warm is None:
            self._warm = self._num_requests, now
            return
        num_before, before = self._warm
        self.record = Record("growth", command=phase.command)
        self.record.expect(
            now <= before * _MOST_GROWTH,
            f"after {self._num_requests} requests the server has {now / before:.3f} of the memory "
            f"that it had after {num_before} ({before >> 20} MiB)",
        )


async def _finish(record: Record, phase: Coroutine[Any, Any, None]) -> None:
    start = time.monotonic()
    try:
        await phase
    except Exception as error:
        record.blame(f"the phase broke off: {error!r}")
    record.seconds = time.monotonic() - start


def _check_temporary(record: Record, running: Running) -> None:
    left = [str(path.name) for path in running.temporary.rglob("*")]
    record.expect(not left, f"temporary files that are left: {left}")


async def _health(running: Running) -> int:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{running.server.url}/health", timeout=patient(10))).status_code


async def _wait_healthy(running: Running) -> None:
    await asyncio.to_thread(running.server.wait_healthy, patient(60))


def _unavailable(outcome: Outcome) -> bool:
    """503, or a stream that ended with an error."""
    return outcome.status == 503 or (outcome.status == 200 and _is_error_event(outcome))


def _unavailable_or_closed(outcome: Outcome) -> bool:
    return _unavailable(outcome) or (outcome.error or "").startswith("connection:")


def _queue_is_full(outcome: Outcome) -> bool:
    return outcome.status == 429 or (outcome.status == 200 and "waiting" in (outcome.error or ""))


def _any_error(outcome: Outcome) -> bool:
    closed = (outcome.error or "").startswith("connection:")
    return closed or outcome.status in (500, 503) or _is_error_event(outcome)


def _is_error_event(outcome: Outcome) -> bool:
    return outcome.status == 200 and (outcome.error or "").startswith("{")
