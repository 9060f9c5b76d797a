"""Imports xgrammar on first use, since it is slow."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from types import ModuleType
from typing import Any

from atom.structured_output.base import GrammarError

INSTALL_HINT = (
    "pip install --no-deps 'xgrammar>=0.2.8,<0.3,!=0.2.9' && pip install apache-tvm-ffi pydantic"
)

# Releases whose grammars let through what they should not, and what that is.
_WRONG_RELEASES = {"0.2.9": "an empty text passes `.+`"}


def why_unusable() -> str | None:
    """Why structured output cannot be had, or None if it can; imports nothing."""
    packages = ("xgrammar", "tvm_ffi")
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        return f"{' and '.join(missing)} not installed"
    version = importlib.metadata.version("xgrammar")
    wrong = _WRONG_RELEASES.get(version)
    return wrong and f"xgrammar {version} is wrong ({wrong})"


def import_xgrammar() -> Any:
    """Import the package.

    Raises:
        GrammarError: when it is not installed, or is a release that is known to be wrong.
    """
    if unusable := why_unusable():
        raise GrammarError(
            f"structured output needs the xgrammar package ({unusable}); run: {INSTALL_HINT}"
        )
    import xgrammar

    return xgrammar


def import_xgrammar_alone() -> None:
    """Import xgrammar without torch and transformers, for the trial process.

    Compiling needs neither, but the package imports both, which takes 3 of 4 seconds and 150 of 180
    MB. They are replaced by placeholders.

    Raises:
        Exception: of any kind, if placeholders do not suffice. This process then cannot import
            xgrammar at all.
    """
    # tvm_ffi supports a missing torch.
    sys.modules["torch"] = None  # type: ignore[assignment]
    import tvm_ffi  # noqa: F401

    placeholders = {name: _Placeholder(name) for name in ("torch", "transformers")}
    sys.modules.update(placeholders)
    import xgrammar  # noqa: F401

    for name in placeholders:
        del sys.modules[name]


class _Placeholder(ModuleType):
    """A module whose attributes are all classes."""

    def __getattr__(self, name: str) -> type[_Anything]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything,), {})


class _Anything:
    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accept any arguments."""
