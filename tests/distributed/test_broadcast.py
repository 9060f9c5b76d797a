"""A broadcast loses nothing, keeps the order, and names who does not take part."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from patience import PATIENCE_SECONDS, wait_until
from work import count_lines

from atom.distributed import broadcast
from atom.distributed.broadcast import MOST_UNREAD, Address, Publisher, Subscriber
from atom.distributed.channel import (
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
)

READER = Path(__file__).with_name("channel_reader.py")
WAYS = ("local", "remote")

Open = Callable[..., tuple[Publisher, list[Subscriber]]]


@pytest.fixture
def open_channel() -> Iterator[Open]:
    """Opens a channel with all its readers: `open_channel(local=(1,), remote=(2,))`."""
    with ExitStack() as stack:

        def open_(
            local: tuple[int, ...] = (), remote: tuple[int, ...] = ()
        ) -> tuple[Publisher, list[Subscriber]]:
            publisher = Publisher.create(local, remote)
            address = Address.decode(publisher.address.encode())
            subscribers = [Subscriber.connect(address, rank) for rank in (*local, *remote)]
            for subscriber in subscribers:
                stack.callback(subscriber.close)
            stack.callback(publisher.close)
            publisher.wait_connected(PATIENCE_SECONDS)
            return publisher, subscribers

        yield open_


def receive(subscriber: Subscriber, count: int) -> list[bytes]:
    return [subscriber.receive(PATIENCE_SECONDS) for _ in range(count)]


def send_many(
    publisher: Publisher,
    count: int,
    timeout_s: float | None = PATIENCE_SECONDS,
    pause_s: float = 0.0,
) -> None:
    for _ in range(count):
        publisher.send(b"x", timeout_s)
        time.sleep(pause_s)


def unconnected(publisher: Publisher) -> list[int]:
    publisher._update()
    return publisher.unconnected


def test_every_reader_gets_every_message_in_order(open_channel: Open) -> None:
    """Of all sizes around those of a piece and of the whole segment, to both kinds of readers."""
    publisher, subscribers = open_channel(local=(1, 2), remote=(3, 4))
    sizes = [0, 1, 20, 2000, 65472 - 1, 65472, 65472 + 1]
    sizes += [1 << 20, (3 << 20) + 5, *range(100, 200)]
    source = random.Random(0)
    messages = [source.randbytes(size) for size in sizes]
    with ThreadPoolExecutor() as pool:
        received = [pool.submit(receive, each, len(messages)) for each in subscribers]
        for message in messages:
            publisher.send(message, PATIENCE_SECONDS)
        for future in received:
            assert future.result() == messages


def test_large_messages_pass_through_a_small_segment(open_channel: Open) -> None:
    publisher, [subscriber] = open_channel(local=(1,))
    message = random.Random(1).randbytes(20 << 20)
    with ThreadPoolExecutor() as pool:
        received = pool.submit(subscriber.receive, PATIENCE_SECONDS)
        publisher.send(message, PATIENCE_SECONDS)
        assert received.result() == message


@pytest.mark.parametrize("way", WAYS)
def test_a_slow_reader_holds_the_publisher_back(open_channel: Open, way: str) -> None:
    publisher, [fast, slow] = open_channel(**{way: (3, 7)})
    reading = threading.Thread(target=receive, args=(fast, MOST_UNREAD + 1))
    reading.start()
    for number in range(MOST_UNREAD):
        publisher.send(b"%d" % number, PATIENCE_SECONDS)
    reads = threading.Event()

    def read() -> None:
        reads.set()
        receive(slow, MOST_UNREAD // 2)

    timer = threading.Timer(0.2, read)
    timer.start()
    publisher.send(b"last", PATIENCE_SECONDS)
    assert reads.is_set()
    timer.join()
    reading.join()
    assert receive(slow, MOST_UNREAD // 2 + 1)[-1] == b"last"


@pytest.mark.parametrize("way", WAYS)
def test_the_reader_that_does_not_read_is_named(open_channel: Open, way: str) -> None:
    publisher, [fast, _] = open_channel(**{way: (3, 7)})
    for _ in range(MOST_UNREAD):
        publisher.send(b"x", PATIENCE_SECONDS)
        fast.receive(PATIENCE_SECONDS)
    with pytest.raises(ChannelTimeoutError, match=f"rank 7 does not read: {MOST_UNREAD} messages"):
        publisher.send(b"x", 0.2)
    with pytest.raises(ChannelClosedError):
        publisher.send(b"some ranks lack the last one")


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_does_not_connect_is_named(way: str) -> None:
    publisher = Publisher.create(**{way: (1, 2)})
    subscriber = Subscriber.connect(publisher.address, 1)
    wait_until(lambda: unconnected(publisher) == [2])
    with pytest.raises(ChannelTimeoutError, match=r"rank 2 did not connect in 0\.2 s"):
        publisher.wait_connected(0.2)
    with pytest.raises(ChannelTimeoutError, match="rank 2 has not connected"):
        send_many(publisher, MOST_UNREAD + 1, 0.1)
    subscriber.close()
    publisher.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_late_reader_gets_what_was_sent_before(way: str) -> None:
    publisher = Publisher.create(**{way: (1,)})
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(publisher.send, b"early", PATIENCE_SECONDS)
        time.sleep(0.1)
        subscriber = Subscriber.connect(publisher.address, 1)
        assert subscriber.receive(PATIENCE_SECONDS) == b"early"
        sent.result()
    publisher.close()
    subscriber.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_time_out_of_a_reader_loses_nothing(open_channel: Open, way: str) -> None:
    publisher, [subscriber] = open_channel(**{way: (1,)})
    began = time.monotonic()
    with pytest.raises(ChannelTimeoutError):
        subscriber.receive(0.2)
    assert time.monotonic() - began >= 0.2
    publisher.send(b"now", PATIENCE_SECONDS)
    assert subscriber.receive(PATIENCE_SECONDS) == b"now"


@pytest.mark.parametrize("way", WAYS)
def test_a_waiting_reader_costs_next_to_nothing(open_channel: Open, way: str) -> None:
    """It sleeps, and looks but now and then: one that never sleeps looks ten thousands of times."""
    _, [subscriber] = open_channel(**{way: (1,)})

    def wait() -> None:
        with pytest.raises(ChannelTimeoutError):
            subscriber.receive(0.5)

    with ThreadPoolExecutor() as pool:
        assert pool.submit(count_lines, wait).result() < 5000


@pytest.mark.parametrize("way", WAYS)
def test_closing_wakes_a_reader_after_the_last_message(open_channel: Open, way: str) -> None:
    publisher, [subscriber] = open_channel(**{way: (1,)})
    publisher.send(b"last", PATIENCE_SECONDS)
    with ThreadPoolExecutor() as pool:
        received = pool.submit(receive, subscriber, 2)
        time.sleep(0.1)
        publisher.close()
        with pytest.raises(ChannelClosedError, match="rank 0 has closed"):
            received.result(PATIENCE_SECONDS)
    with pytest.raises(ChannelClosedError):
        publisher.send(b"x")


@pytest.mark.parametrize("way", WAYS)
def test_both_sides_can_be_closed_by_another_thread(open_channel: Open, way: str) -> None:
    publisher, [subscriber] = open_channel(**{way: (1,)})
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(send_many, publisher, MOST_UNREAD + 1, None)
        time.sleep(0.1)
        publisher.close()
        with pytest.raises(ChannelClosedError):
            sent.result(PATIENCE_SECONDS)
        received = pool.submit(receive, subscriber, MOST_UNREAD + 1)
        with pytest.raises(ChannelClosedError):
            received.result(PATIENCE_SECONDS)
        other, [waiting] = open_channel(**{way: (1,)})
        received = pool.submit(receive, waiting, 1)
        time.sleep(0.1)
        waiting.close()
        with pytest.raises(ChannelClosedError):
            received.result(PATIENCE_SECONDS)
    other.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_reader_that_leaves_is_named(open_channel: Open, way: str) -> None:
    publisher, [_, leaving] = open_channel(**{way: (1, 2)})
    leaving.close()
    with pytest.raises(ChannelClosedError, match="rank 2 has left"):
        send_many(publisher, MOST_UNREAD, pause_s=0.5)


def test_a_rank_connects_once(open_channel: Open) -> None:
    publisher, _ = open_channel(local=(1,), remote=(2,))
    with pytest.raises(ValueError, match=r"for ranks \(1, 2\), not 3"):
        Subscriber.connect(publisher.address, 3)
    second = Subscriber.connect(publisher.address, 2)
    with pytest.raises(ChannelError, match=r"two processes .* as rank 2"):
        send_many(publisher, MOST_UNREAD, pause_s=0.5)
    second.close()


def test_channels_are_independent(open_channel: Open) -> None:
    first, [of_first] = open_channel(local=(1,))
    second, [of_second] = open_channel(local=(1,))
    first.send(b"first", PATIENCE_SECONDS)
    second.send(b"second", PATIENCE_SECONDS)
    assert receive(of_first, 1) == [b"first"]
    assert receive(of_second, 1) == [b"second"]


def test_strangers_get_nothing(open_channel: Open, caplog: pytest.LogCaptureFixture) -> None:
    publisher, [subscriber] = open_channel(remote=(1,))
    stranger = Subscriber.connect(Address(b"0" * 16, (), (1,), None, publisher.address.endpoint), 1)
    wait_until(lambda: unconnected(publisher) == [] and "hello of a stranger" in caplog.text)
    publisher.send(b"secret", PATIENCE_SECONDS)
    assert subscriber.receive(PATIENCE_SECONDS) == b"secret"
    with pytest.raises(ChannelTimeoutError):
        stranger.receive(0.2)
    stranger.close()


def test_a_context_that_never_ends_does_not_hold_up_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As about one in a thousand of libzmq 4.3 when both sides close at the same time."""
    give_up, has_ended = threading.Event(), threading.Event()

    def term(_: zmq.Context[zmq.Socket[bytes]]) -> None:
        give_up.wait()
        has_ended.set()

    monkeypatch.setattr(broadcast, "_LINGER_MS", 0)
    monkeypatch.setattr(zmq.Context, "term", term)
    publisher = Publisher.create(remote=(1,))
    publisher.close()
    assert not has_ended.is_set()
    give_up.set()


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    with pytest.raises(ChannelError, match=r"192\.0\.2\.1: .* this machine"):
        Publisher.create(local=(2,), remote=(1,), host="192.0.2.1")


def test_the_host_can_be_a_name() -> None:
    publisher = Publisher.create(remote=(1,), host="localhost")
    subscriber = Subscriber.connect(publisher.address, 1)
    publisher.send(b"x", PATIENCE_SECONDS)
    assert subscriber.receive(PATIENCE_SECONDS) == b"x"
    publisher.close()
    subscriber.close()


def test_readers_in_other_processes_also_when_one_is_killed() -> None:
    publisher = Publisher.create(local=(1, 2), remote=(3,))
    command = [sys.executable, str(READER), publisher.address.encode().decode()]
    readers = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in (1, 2, 3)
    ]
    publisher.wait_connected(PATIENCE_SECONDS)
    messages = [bytes([number]) * number * 3000 for number in range(50)]
    for message in messages:
        publisher.send(message, PATIENCE_SECONDS)
    checksums = [str(zlib.crc32(message)) for message in messages]
    for reader in readers:
        assert reader.stdout is not None
        lines = [reader.stdout.readline().strip() for _ in range(51)]
        assert lines == ["connected", *checksums]
    readers[1].kill()
    with pytest.raises(ChannelClosedError, match="rank 2 has left the channel, or died"):
        send_many(publisher, MOST_UNREAD + 1)
    publisher.close()
    for reader in readers:
        out, _ = reader.communicate(timeout=PATIENCE_SECONDS)
        assert reader.returncode == -9 or out.endswith("closed\n")


def test_a_reader_notices_that_rank_0_was_killed() -> None:
    program = (
        "import time; from atom.distributed.broadcast import Publisher; "
        "publisher = Publisher.create(local=(1,)); "
        "print(publisher.address.encode().decode(), flush=True); "
        "publisher.send(b'last'); time.sleep(600)"
    )
    rank0 = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert rank0.stdout is not None
    subscriber = Subscriber.connect(Address.decode(rank0.stdout.readline()), 1)
    with ThreadPoolExecutor() as pool:
        received = pool.submit(receive, subscriber, 2)
        time.sleep(0.1)
        rank0.kill()
        with pytest.raises(ChannelClosedError, match="rank 0 has died"):
            received.result(PATIENCE_SECONDS)
    subscriber.close()
    rank0.communicate()
