"""Rank 0 and the others notice who is gone and why, and raise no false alarm."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import PATIENCE_SECONDS, wait_until

from atom.distributed import heartbeats, watch
from atom.distributed.channel import ChannelError
from atom.distributed.heartbeats import RankFailure, WatchAddress
from atom.distributed.local_process import LocalProcess
from atom.distributed.stages import Stages
from atom.distributed.watch import RankReporter, RankWatch

PROGRAM = [sys.executable, str(Path(__file__).with_name("watched_process.py"))]
QUICK = 1.0

Process = subprocess.Popen[str]
Start = Callable[..., Process]


class Heard:
    """Collects what a callback is called with."""

    def __init__(self) -> None:
        self._queue: queue.Queue[RankFailure | None] = queue.Queue()

    def __call__(self, failure: RankFailure | None) -> None:
        self._queue.put(failure)

    def next(self) -> RankFailure | None:
        return self._queue.get(timeout=PATIENCE_SECONDS)

    def nothing(self, seconds: float) -> bool:
        try:
            self._queue.get(timeout=seconds)
        except queue.Empty:
            return True
        return False

    def failure(self) -> RankFailure:
        failure = self.next()
        assert failure is not None
        return failure


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(stack: ExitStack) -> Start:
    """Starts `watched_process.py`; killed at the end."""

    def start_(*args: object) -> Process:
        process = subprocess.Popen(
            [*PROGRAM, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        return process

    return start_


def open_watch(stack: ExitStack, ranks: list[int], **options: object) -> tuple[RankWatch, Heard]:
    heard = Heard()
    result = RankWatch("127.0.0.1", ranks, heard, **options)
    stack.callback(result.close)
    return result, heard


def open_reporter(
    stack: ExitStack, address: WatchAddress, rank: int, **options: object
) -> tuple[RankReporter, Heard]:
    heard = Heard()
    result = RankReporter(address, rank, heard, **options)
    stack.callback(result.close)
    return result, heard


def begin(process: Process, watched: RankWatch, rank: int) -> None:
    """Give a rank in another process the address, and wait until it has said that it lives."""
    tell(process, watched.address.encode().decode())
    wait_until(lambda: watched._ranks[rank].sender is not None)


def tell(process: Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def test_a_rank_that_raises_says_why(stack: ExitStack) -> None:
    watched, heard = open_watch(stack, [1, 2])
    failing, _ = open_reporter(stack, watched.address, 2)
    open_reporter(stack, watched.address, 1)
    failing.failed("ValueError: no such expert")
    failure = heard.failure()
    host = os.uname().nodename
    assert failure.describe() == (
        f"rank 2 (pid {os.getpid()} on host {host}) raised ValueError: no such expert"
    )
    assert (failure.how, failure.is_local, watched.failure) == ("raised", False, failure)


def test_a_killed_local_process_is_noticed_at_once(stack: ExitStack) -> None:
    """Before it has sent any heartbeat."""
    sleeper = subprocess.Popen(["sleep", "600"])
    stack.callback(sleeper.wait)
    _, heard = open_watch(stack, [1], local_pids={1: sleeper.pid})
    sleeper.kill()
    failure = heard.failure()
    assert failure == RankFailure(
        1, sleeper.pid, None, "died", "was killed by signal 9, perhaps for lack of memory", True
    )
    assert failure.describe().startswith(f"rank 1 (pid {sleeper.pid}) was killed by signal 9")


def test_last_words_count_more_than_the_exit(stack: ExitStack, start: Start) -> None:
    process = start("report", 1)
    watched, heard = open_watch(stack, [1], local_pids={1: process.pid})
    begin(process, watched, 1)
    tell(process, "fail RuntimeError: too warm\nexit 3")
    assert heard.failure().describe().endswith("raised RuntimeError: too warm")


def test_a_killed_rank_elsewhere_is_noticed_by_its_connection(
    stack: ExitStack, start: Start
) -> None:
    process = start("report", 1)
    watched, heard = open_watch(stack, [1])
    begin(process, watched, 1)
    process.kill()
    failure = heard.failure()
    assert (failure.how, failure.pid) == ("died", process.pid)
    assert "lost its connection" in failure.describe()


def test_the_rank_that_died_is_blamed_not_the_one_that_raised_for_it(
    stack: ExitStack, start: Start
) -> None:
    watched, heard = open_watch(stack, [1, 2])
    dying = start("report", 1)
    begin(dying, watched, 1)
    victim, _ = open_reporter(stack, watched.address, 2)
    wait_until(lambda: watched._ranks[2].sender is not None)
    dying.kill()
    dying.wait()
    victim.failed("RuntimeError: connection closed by peer")
    assert heard.failure().rank == 1


@pytest.mark.parametrize(
    ("is_local", "limit"), [(True, "STOPPED_SECONDS"), (False, "FIRST_STEP_SECONDS")]
)
def test_a_stopped_rank_is_silent(
    stack: ExitStack, start: Start, monkeypatch: pytest.MonkeyPatch, is_local: bool, limit: str
) -> None:
    """One of this machine is asked for its state long before, and can be killed."""
    monkeypatch.setattr(heartbeats, limit, QUICK)
    process = start("report", 1)
    watched, heard = open_watch(stack, [1], local_pids={1: process.pid} if is_local else {})
    begin(process, watched, 1)
    process.send_signal(signal.SIGSTOP)
    failure = heard.failure()
    assert (failure.how, failure.pid, failure.is_local) == ("silent", process.pid, is_local)
    assert "stopped" in failure.describe()


def test_a_rank_may_be_silent_for_longer_until_its_first_step_is_through() -> None:
    assert heartbeats.longest_silence(0) == heartbeats.longest_silence(1) == 60
    assert heartbeats.longest_silence(2) == 10


def test_a_short_stop_is_no_failure(
    stack: ExitStack, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "FIRST_STEP_SECONDS", PATIENCE_SECONDS)
    process = start("report", 1)
    watched, heard = open_watch(stack, [1])
    begin(process, watched, 1)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.2)
    rank, goes_on = watched._ranks[1], time.monotonic()
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: rank.heard_at > goes_on)
    assert rank.deadline >= goes_on + PATIENCE_SECONDS
    assert heard.nothing(3 * heartbeats.SETTLE_SECONDS)


def test_silence_during_a_stop_of_the_watching_thread_does_not_count(
    stack: ExitStack, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the machine was suspended: nobody was heard, since nobody ran."""
    suspensions, lost = list[float](), 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + lost)
    for module in (heartbeats, watch):
        monkeypatch.setattr(module, "time", clock)

    def suspend() -> int:
        nonlocal lost
        if suspensions:
            lost += suspensions.pop()
        return 0

    watched, heard = open_watch(stack, [1], count_steps=suspend)
    begin(start("report", 1), watched, 1)
    suspensions.append(10 * heartbeats.FIRST_STEP_SECONDS)
    wait_until(lambda: lost > 0)
    goes_on = clock.monotonic()
    wait_until(lambda: watched._ranks[1].heard_at > goes_on)
    assert heard.nothing(3 * heartbeats.SETTLE_SECONDS)


def test_a_rank_that_says_goodbye_is_no_failure(stack: ExitStack, start: Start) -> None:
    process = start("report", 1)
    watched, heard = open_watch(stack, [1], local_pids={1: process.pid})
    begin(process, watched, 1)
    tell(process, "goodbye\nexit 0")
    process.wait()
    assert heard.nothing(3 * heartbeats.SETTLE_SECONDS)


def test_a_rank_that_never_connects_is_named(stack: ExitStack) -> None:
    _, heard = open_watch(stack, [1], connect_s=0.2)
    assert heard.failure().describe() == "rank 1 has not connected within 0.2 s"


def test_steps_are_reported(stack: ExitStack) -> None:
    watched, _ = open_watch(stack, [1])
    open_reporter(stack, watched.address, 1, count_steps=lambda: 17)
    wait_until(lambda: watched.steps == {1: 17})


def test_a_rank_that_stays_behind_is_named(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeats, "BEHIND_SECONDS", 0.2)
    watched, heard = open_watch(stack, [1, 2], count_steps=lambda: 5)
    open_reporter(stack, watched.address, 1, count_steps=lambda: 5)
    open_reporter(stack, watched.address, 2, count_steps=lambda: 4)
    wait_until(lambda: "it has begun 4 steps, and rank 0 5" in caplog.text)
    assert heard.nothing(0.6)
    assert [record.args[0] for record in caplog.records] == [2]


def test_a_rank_that_stays_behind_in_the_start_is_named(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeats, "BEHIND_SECONDS", 0.2)
    own, slow = Stages(), Stages()
    for stages in (own, slow):
        stages.begin("loading the weights")
    watched, heard = open_watch(stack, [1, 2], stages=own)
    open_reporter(stack, watched.address, 1, stages=own)
    open_reporter(stack, watched.address, 2, stages=slow)
    wait_until(lambda: watched._ranks[2].stage == slow.current)
    assert watched.awaited == []
    own.begin("capturing graphs")
    wait_until(lambda: watched.awaited == ["rank 2 is loading the weights"])
    wait_until(lambda: "is behind" in caplog.text)
    [said] = caplog.messages
    assert said.startswith("rank 2 (pid ")
    assert "it is loading the weights, and rank 0 is capturing graphs, for " in said
    assert heard.nothing(0.6)
    assert len(caplog.messages) == 1
    slow.begin("capturing graphs")
    wait_until(lambda: watched.awaited == [])


def test_rank_0_says_goodbye_or_why_it_fails(stack: ExitStack) -> None:
    for cause, words in ((None, None), ("rank 2 was killed", "has ended: rank 2 was killed")):
        watched, _ = open_watch(stack, [1])
        _, heard = open_reporter(stack, watched.address, 1)
        wait_until(lambda: watched._ranks[1].sender is not None)  # noqa: B023
        watched.close(cause)
        failure = heard.next()
        assert (failure and failure.cause) == words


def test_a_killed_rank_0_is_noticed_at_once_on_its_machine(stack: ExitStack, start: Start) -> None:
    rank0 = start("watch", 1, 2)
    assert rank0.stdout is not None
    address = WatchAddress.decode(rank0.stdout.readline().encode())
    _, heard = open_reporter(stack, address, 1, rank0_pid=rank0.pid)
    rank0.kill()
    assert "was killed by signal 9" in heard.failure().describe()


@pytest.mark.parametrize(
    ("is_local", "limit"), [(True, "STOPPED_SECONDS"), (False, "FIRST_STEP_SECONDS")]
)
def test_a_stopped_rank_0_is_silent(
    stack: ExitStack, start: Start, monkeypatch: pytest.MonkeyPatch, is_local: bool, limit: str
) -> None:
    monkeypatch.setattr(heartbeats, limit, QUICK)
    rank0 = start("watch", 1)
    assert rank0.stdout is not None
    address = WatchAddress.decode(rank0.stdout.readline().encode())
    reporting, heard = open_reporter(stack, address, 1, rank0_pid=rank0.pid if is_local else None)
    wait_until(lambda: reporting._rank0_sender is not None)
    rank0.send_signal(signal.SIGSTOP)
    failure = heard.failure()
    assert (failure.rank, failure.how, failure.pid) == (0, "silent", rank0.pid)


def test_strangers_are_not_believed(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    watched, heard = open_watch(stack, [1])
    stranger = WatchAddress(watched.address.endpoint, b"0" * 16)
    reporting, _ = open_reporter(stack, stranger, 1)
    reporting.failed("ValueError: believe me")
    wait_until(lambda: "no rank sends" in caplog.text)
    assert heard.nothing(0.5)


def test_closing_from_the_callback_does_not_hang(stack: ExitStack) -> None:
    heard = Heard()

    def close(failure: RankFailure) -> None:
        watched.close(failure.describe())
        heard(failure)

    watched = RankWatch("127.0.0.1", [1, 2], close)
    _, of_1 = open_reporter(stack, watched.address, 1)
    failing, _ = open_reporter(stack, watched.address, 2)
    wait_until(lambda: all(rank.sender for rank in watched._ranks.values()))
    failing.failed("ValueError: 2")
    heard.next()
    assert "has ended: rank 2" in of_1.failure().describe()


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    with pytest.raises(ChannelError, match="must be a name or address of this machine"):
        RankWatch("192.0.2.1", [1], Heard())


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_local_process(has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_pidfd:

        def refuse(_: int) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", refuse)
    process = subprocess.Popen(["sh", "-c", "read line; exit 7"], stdin=subprocess.PIPE)
    local = LocalProcess(process.pid)
    assert not local.has_ended
    process.stdin.close()
    wait_until(lambda: local.has_ended)
    assert local.describe_exit() == "ended with status 7"
    assert process.wait() == 7  # it was not reaped
    assert local.has_ended
    assert local.describe_exit() == "has ended"
    local.close()
    assert LocalProcess(process.pid).has_ended
    assert not LocalProcess(os.getpid()).has_ended
