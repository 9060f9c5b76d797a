"""Entry point of `python -m atom.spec_decode.training`."""

from __future__ import annotations

import sys

from atom.spec_decode.training.cli import main

sys.exit(main())
