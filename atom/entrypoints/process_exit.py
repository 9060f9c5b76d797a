"""How programs with an engine end."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """End this process. An ordinary exit waits for threads, which may be at work for nobody."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
