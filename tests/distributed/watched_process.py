"""A process that is a rank, or rank 0, and obeys lines on its standard input.

Usage: watched_process.py report RANK | watch RANK...

A rank reads the address from the first line.
"""

from __future__ import annotations

import sys

from atom.distributed.heartbeats import RankFailure, WatchAddress
from atom.distributed.watch import RankReporter, RankWatch

assert "torch" not in sys.modules, "these modules must be light"


def say(failure: RankFailure | None) -> None:
    print("goodbye" if failure is None else failure.describe(), flush=True)


match sys.argv[1:]:
    case ["report", rank]:
        address = WatchAddress.decode(sys.stdin.readline().encode())
        reporter = RankReporter(address, int(rank), say)
        for line in sys.stdin:
            match line.split(maxsplit=1):
                case ["fail", cause]:
                    reporter.failed(cause.strip())
                case ["goodbye"]:
                    reporter.close()
                case ["exit", status]:
                    sys.exit(int(status))
    case ["watch", *ranks]:
        watch = RankWatch("127.0.0.1", map(int, ranks), say)
        print(watch.address.encode().decode(), flush=True)
        sys.stdin.read()
