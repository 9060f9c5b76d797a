"""xgrammar, imported when the first grammar is wanted: that takes a while."""

from __future__ import annotations

import sys
from types import ModuleType
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


def import_xgrammar_alone() -> None:
    """Import it without torch and transformers, for a process that has no use for them.

    Compiling needs neither, but the package imports both, for other ends: 3 of the 4 seconds that
    it takes, and 150 of 180 MB. It gets placeholders instead.

    Raises:
        Exception: of any kind, where the package wants more of them than that they are there.
            This process cannot import it then.
    """
    # Its foundation does without torch.
    sys.modules["torch"] = None  # type: ignore[assignment]
    import tvm_ffi  # noqa: F401

    placeholders = {name: _Placeholder(name) for name in ("torch", "transformers")}
    sys.modules.update(placeholders)
    import xgrammar  # noqa: F401

    for name in placeholders:
        del sys.modules[name]


class _Placeholder(ModuleType):
    """A module where every name is that of a class."""

    def __getattr__(self, name: str) -> type[_Anything]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything,), {})


class _Anything:
    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accepts whatever the class that it stands for does."""
