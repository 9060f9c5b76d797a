"""The process of a rank that follows rank 0: `python -m atom.model_engine.processes.rank_process`.

Whoever starts it sets RANK and so on, writes its instructions to its standard input, and holds that
open: the process ends when it closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading

from atom import logs
from atom.config import EngineConfig
from atom.distributed.launch import LENGTH_BYTES
from atom.distributed.rank_environment import RankEnvironment, launched_rank
from atom.environment import rank_variables
from atom.model_engine.processes import wire

logger = logging.getLogger(__name__)


def main() -> int:
    _leave_signals_to_rank_0()
    environment = launched_rank(rank_variables())
    message = _read_instructions()
    if environment is None or message is None:
        print("error: this program is started by rank 0 of an engine", file=sys.stderr)
        return 2
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    logs.set_up(message.log_format, process=f"rank {environment.rank}")
    logging.getLogger("atom").setLevel(message.log_level)
    return follow_rank_0(message.config, environment)


def follow_rank_0(config: EngineConfig, environment: RankEnvironment) -> int:
    """Be a rank until rank 0 ends; returns the exit status of the process."""
    # Imported after signals and standard input are handled, since it takes seconds.
    from atom.model_engine.executor import follow
    from atom.model_engine.processes.causes import is_users
    from atom.model_engine.processes.join import join_as_follower

    try:
        follower = join_as_follower(config, environment)
        _leave_signals_to_rank_0()
        follow(config, follower)
    except Exception as error:
        if is_users(error):
            print(f"error: rank {environment.rank}: {error}", file=sys.stderr)
        else:
            logger.exception("rank %d failed", environment.rank)
        return 1
    return 0


def _leave_signals_to_rank_0() -> None:
    """Ctrl-C, launchers and service managers signal all processes, but rank 0 may have requests in
    flight, and ends the others itself.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _read_instructions() -> wire.Start | None:
    length = int.from_bytes(sys.stdin.buffer.read(LENGTH_BYTES), "big")
    data = sys.stdin.buffer.read(length)
    if not data or len(data) < length:
        return None
    message = wire.decode_to_engine(data)
    return message if isinstance(message, wire.Start) else None


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # Without destructors: one of a process group may wait for other ranks for ever.
    os._exit(status)
