"""xgrammar, imported when the first grammar is wanted: that takes a while."""

from __future__ import annotations

from typing import Any

from atom.structured_output.base import GrammarError

INSTALL_HINT = "pip install --no-deps 'xgrammar>=0.2.8,<0.3' && pip install apache-tvm-ffi pydantic"


def import_xgrammar() -> Any:
    """The package.

    Raises:
        GrammarError: when it is not installed.
    """
    try:
        import xgrammar
    except ImportError as error:
        raise GrammarError(
            f"structured output needs the xgrammar package ({error}); run: {INSTALL_HINT}"
        ) from error
    return xgrammar
