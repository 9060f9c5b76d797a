"""A broadcast loses nothing, keeps the order, and names who does not take part."""

from __future__ import annotations

import errno
import gc
import os
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

from atom.distributed import broadcast, channel, shared_ring, tcp_fanout
from atom.distributed.broadcast import Address, Publisher, Subscriber
from atom.distributed.channel import (
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
)
from atom.distributed.ring_segment import NUM_SLOTS, PIECE_BYTES

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


def mapped_segments() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().split("\n") if "atom-" in line]


def test_every_reader_gets_every_message_in_order(open_channel: Open) -> None:
    """Of all sizes around those of a piece and of the whole segment, to both kinds of readers."""
    publisher, subscribers = open_channel(local=(1, 2), remote=(3, 4))
    sizes = [0, 1, 20, 2000, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1]
    sizes += [NUM_SLOTS * PIECE_BYTES, 3 * NUM_SLOTS * PIECE_BYTES + 5, *range(100, 200)]
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
    reading = threading.Thread(target=receive, args=(fast, NUM_SLOTS + 1))
    reading.start()
    for number in range(NUM_SLOTS):
        publisher.send(b"%d" % number, PATIENCE_SECONDS)
    reads = threading.Event()

    def read() -> None:
        reads.set()
        slow.receive(PATIENCE_SECONDS)

    timer = threading.Timer(0.2, read)
    timer.start()
    publisher.send(b"last", PATIENCE_SECONDS)
    assert reads.is_set()
    timer.join()
    reading.join()
    assert receive(slow, NUM_SLOTS)[-1] == b"last"


@pytest.mark.parametrize("way", WAYS)
def test_the_reader_that_does_not_read_is_named(open_channel: Open, way: str) -> None:
    publisher, [fast, _] = open_channel(**{way: (3, 7)})
    for _ in range(NUM_SLOTS):
        publisher.send(b"x", PATIENCE_SECONDS)
        fast.receive(PATIENCE_SECONDS)
    with pytest.raises(ChannelTimeoutError, match=f"rank 7 does not read: {NUM_SLOTS} messages"):
        publisher.send(b"x", 0.2)
    with pytest.raises(ChannelClosedError):
        publisher.send(b"some ranks lack the last one")


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_does_not_connect_is_named(way: str) -> None:
    publisher = Publisher.create(**{way: (1, 2)})
    subscriber = Subscriber.connect(publisher.address, 1)
    [writer] = publisher._writers
    wait_until(lambda: writer.unconnected() == [2])
    with pytest.raises(ChannelTimeoutError, match=r"rank 2 did not connect in 0\.2 s"):
        publisher.wait_connected(0.2)
    with pytest.raises(ChannelTimeoutError, match="rank 2 has not connected"):
        send_many(publisher, NUM_SLOTS + 1, 0.1)
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
def test_a_waiting_reader_costs_next_to_nothing(
    open_channel: Open, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps, and looks but now and then: one that never sleeps looks ten thousands of times."""
    monkeypatch.setattr(channel, "_SPIN_SECONDS", 0.0)
    _, [subscriber] = open_channel(**{way: (1,)})

    def wait() -> None:
        with pytest.raises(ChannelTimeoutError):
            subscriber.receive(0.5)

    with ThreadPoolExecutor() as pool:
        assert pool.submit(count_lines, wait).result() < 5000


def test_a_sleeping_reader_is_woken(open_channel: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_ring, "NAP_SECONDS", 2 * PATIENCE_SECONDS)
    publisher, [subscriber] = open_channel(local=(1,))
    with ThreadPoolExecutor() as pool:
        received = pool.submit(subscriber.receive, 2 * PATIENCE_SECONDS)
        time.sleep(0.2)
        publisher.send(b"wake up", PATIENCE_SECONDS)
        assert received.result(PATIENCE_SECONDS) == b"wake up"


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
        sent = pool.submit(send_many, publisher, NUM_SLOTS + 1, None)
        time.sleep(0.1)
        publisher.close()
        with pytest.raises(ChannelClosedError):
            sent.result(PATIENCE_SECONDS)
        received = pool.submit(receive, subscriber, NUM_SLOTS + 1)
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
        send_many(publisher, NUM_SLOTS, pause_s=0.5)


def test_a_rank_connects_once(open_channel: Open) -> None:
    publisher, _ = open_channel(local=(1,), remote=(2,))
    with pytest.raises(ChannelError, match=f"already, with pid {os.getpid()}"):
        Subscriber.connect(publisher.address, 1)
    with pytest.raises(ValueError, match=r"for ranks \(1, 2\), not 3"):
        Subscriber.connect(publisher.address, 3)
    second = Subscriber.connect(publisher.address, 2)
    with pytest.raises(ChannelError, match=r"two processes .* as rank 2"):
        send_many(publisher, NUM_SLOTS, pause_s=0.5)
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
    [writer] = publisher._writers
    wait_until(lambda: writer.unconnected() == [] and "hello of a stranger" in caplog.text)
    publisher.send(b"secret", PATIENCE_SECONDS)
    assert subscriber.receive(PATIENCE_SECONDS) == b"secret"
    with pytest.raises(ChannelTimeoutError):
        stranger.receive(0.2)
    stranger.close()


def test_the_segment_of_another_channel_is_refused(open_channel: Open) -> None:
    publisher, _ = open_channel(local=(1,))
    address = publisher.address
    wrong = Address(b"0" * 16, (1,), (), address.segment, None)
    with pytest.raises(ChannelError, match="another channel"):
        Subscriber.connect(wrong, 1)
    publisher.close()
    with pytest.raises(ChannelError, match="rank 0 must be alive"):
        Subscriber.connect(address, 1)


def test_a_context_that_never_ends_does_not_hold_up_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As about one in a thousand of libzmq 4.3 when both sides close at the same time."""
    give_up, has_ended = threading.Event(), threading.Event()

    def term(_: zmq.Context[zmq.Socket[bytes]]) -> None:
        give_up.wait()
        has_ended.set()

    monkeypatch.setattr(tcp_fanout, "_LINGER_MS", 0)
    monkeypatch.setattr(zmq.Context, "term", term)
    publisher = Publisher.create(remote=(1,))
    publisher.close()
    assert not has_ended.is_set()
    give_up.set()


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    before = set(mapped_segments())
    with pytest.raises(ChannelError, match=r"192\.0\.2\.1: .* this machine"):
        Publisher.create(local=(2,), remote=(1,), host="192.0.2.1")
    assert set(mapped_segments()) <= before


def test_the_host_can_be_a_name() -> None:
    publisher = Publisher.create(remote=(1,), host="localhost")
    subscriber = Subscriber.connect(publisher.address, 1)
    publisher.send(b"x", PATIENCE_SECONDS)
    assert subscriber.receive(PATIENCE_SECONDS) == b"x"
    publisher.close()
    subscriber.close()


def test_a_piece_with_a_wrong_checksum_is_not_taken(
    open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor that shows the number of a piece before its bytes."""
    publisher, [subscriber] = open_channel(local=(1,))
    monkeypatch.setattr(shared_ring, "_MOST_BAD_CHECKSUMS", 10)
    monkeypatch.setattr(shared_ring, "checksum", lambda *_: 0)
    publisher.send(b"not all there", PATIENCE_SECONDS)
    monkeypatch.undo()
    with pytest.raises(ChannelTimeoutError):
        subscriber.receive(0.0)
    monkeypatch.setattr(shared_ring, "_MOST_BAD_CHECKSUMS", 10)
    with pytest.raises(ChannelError, match="damaged"):
        subscriber.receive(PATIENCE_SECONDS)


def test_nothing_is_left_in_the_file_system_or_mapped() -> None:
    """There is never a file, so nothing can be left behind even if all are killed."""
    gc.collect()
    mapped, opened = set(mapped_segments()), set(os.listdir("/proc/self/fd"))
    publisher = Publisher.create(local=(1,))
    subscriber = Subscriber.connect(publisher.address, 1)
    ours = set(mapped_segments()) - mapped
    assert len(ours) == 2
    # A file that never had a name in any folder.
    assert all("/memfd:" in line for line in ours)
    subscriber.close()
    publisher.close()
    assert not ours & set(mapped_segments())
    assert set(os.listdir("/proc/self/fd")) <= opened


def test_a_lack_of_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ChannelError, match=r"cannot share .* No space left"):
        Publisher.create(local=(1,))


def test_without_shared_memory_all_ranks_read_over_tcp(
    open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "HAS_SHARED_MEMORY", False)
    publisher, subscribers = open_channel(local=(1,), remote=(2,))
    assert publisher.address.segment is None
    publisher.send(b"x", PATIENCE_SECONDS)
    assert [receive(each, 1) for each in subscribers] == [[b"x"], [b"x"]]


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
    with pytest.raises(ChannelClosedError, match=rf"rank 2 \(pid {readers[1].pid}\) has died"):
        send_many(publisher, NUM_SLOTS + 1)
    publisher.close()
    for reader in readers:
        out, _ = reader.communicate(timeout=PATIENCE_SECONDS)
        assert reader.returncode == -9 or out.endswith("closed\n")


def test_a_reader_notices_that_rank_0_was_killed() -> None:
    program = (
        "import time; from atom.distributed.broadcast import Publisher; "
        "publisher = Publisher.create(local=(1,)); publisher.send(b'last'); "
        "print(publisher.address.encode().decode(), flush=True); time.sleep(600)"
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
