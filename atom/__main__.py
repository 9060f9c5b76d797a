"""The `atom` command, which is also `python -m atom`.

It imports nothing before Ctrl-C ends the process without a traceback.
"""

from __future__ import annotations

import os

_INTERRUPTED = 130  # the exit code of shells


def run() -> None:
    """Run the command; after Ctrl-C the exit code is 130, from the first import on."""
    try:
        import signal
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)
    raises = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if raises:  # a process in the background may have been started to ignore it
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from atom.entrypoints.process_exit import end_process
    from atom.entrypoints.terminal.command import main

    try:
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
    except KeyboardInterrupt:
        status = _INTERRUPTED
    end_process(status)


if __name__ == "__main__":
    run()
