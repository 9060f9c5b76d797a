"""What the tests of models share."""

from __future__ import annotations

from one_thread import one_thread  # noqa: F401  # a fixture
