"""Entry point of `python -m atom.training`."""

from __future__ import annotations

import signal
import sys

from atom.training.cli import main

# A synthesis that is stopped writes what it has, also when it runs in a shell's background, where
# interrupts are ignored.
for stop in (signal.SIGINT, signal.SIGTERM):
    signal.signal(stop, signal.default_int_handler)
sys.exit(main())
