"""The benchmarks of a start and of the server, on programs and streams of known content."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_time_to_what_follows_a_text() -> None:
    import start_up

    program = (
        "import time\nprint('> hi', flush=True)\ntime.sleep(0.3)\n"
        "while time.process_time() < 0.1: pass\nprint('x', flush=True)"
    )
    seconds, processor_seconds = start_up.measure((sys.executable, "-c", program), b"> hi\n")
    assert seconds >= 0.3
    assert 0 < processor_seconds < seconds
    with pytest.raises(SystemExit, match="without a token"):
        start_up.measure((sys.executable, "-c", "print('> hi')"), b"> hi\n")


def tokens_of(*pieces: bytes) -> int:
    import server_overhead

    async def read() -> int:
        reader = asyncio.StreamReader()
        for piece in pieces:
            reader.feed_data(piece)
        reader.feed_eof()
        return await server_overhead._tokens_of(reader)

    return asyncio.run(read())


def test_the_tokens_of_a_stream_are_those_of_its_last_usage() -> None:
    first, last = b'data: {"completion_tokens":1}\n\n', b'data: {"completion_tokens":12}\n\n'
    assert tokens_of(b"HTTP/1.1 200 OK\r\n\r\n" + first, last, b"\r\n0\r\n\r\n") == 12
    with pytest.raises(ConnectionError, match="no usage"):
        tokens_of(b"HTTP/1.1 400 Bad Request\r\n\r\n0\r\n\r\n")
    with pytest.raises(ConnectionError, match="closed"):
        tokens_of(first)


def test_a_server_gets_the_options_of_the_engine() -> None:
    import server_overhead

    options: dict[str, Any] = {"max_num_seqs": 8, "enforce_eager": True, "dtype": "float32"}
    flags = server_overhead.server_flags(options, no_speculation=True)
    assert flags == [
        *("--no-speculation", "--max-num-seqs", "8", "--enforce-eager", "--dtype", "float32"),
    ]
