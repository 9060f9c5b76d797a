"""`python -m atom.plan`."""

import sys

from atom.plan.cli import main

sys.exit(main())
