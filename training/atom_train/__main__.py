"""Entry point of `python -m atom_train`."""

from __future__ import annotations

import signal
import sys

from atom_train.cli import main

# A stopped synthesis writes what it has, even as a background job, where SIGINT is ignored.
for stop in (signal.SIGINT, signal.SIGTERM):
    signal.signal(stop, signal.default_int_handler)
sys.exit(main())
