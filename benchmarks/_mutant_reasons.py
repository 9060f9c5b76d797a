"""Changes of the core that no test need notice, with the reasons."""

from __future__ import annotations

# By file below `atom/`, function, what is changed, and into what.
_REASONS: dict[tuple[str, str, str, str], str] = {}


def reason_of(path: str, function: str, before: str, after: str) -> str | None:
    """Why nothing that could be seen depends on a change; None where a test is missing."""
    key = (path.removeprefix("atom/"), function, _line(before), _line(after))
    return _REASONS.get(key)


def _line(text: str) -> str:
    return " ".join(text.split())
