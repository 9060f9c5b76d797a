"""What becomes of the fields of a body that no model of it names.

Nothing that would change an answer is ignored silently, and nothing that asks for nothing is
refused. An unknown field is, by its path:

- refused when `REFUSED` has it, unless it has one of the values there: it changes answers;
- passed over when its value is null, false or empty, or one that `HARMLESS` has;
- else ignored, with a warning and by name in the answer's headers, or refused: the server's
  `--unknown-fields` says which.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from atom.entrypoints.http.engine_defaults import ANY, HARMLESS, REFUSED
from atom.entrypoints.http.errors import bad_request
from atom.entrypoints.http.provider_tools import ProviderTool
from atom.quoting import excerpt, quote

logger = logging.getLogger(__name__)

IGNORED_FIELDS_HEADER = "x-atom-ignored-fields"

# The code of what is refused because it is unknown, and because it is known not to be supported.
UNKNOWN_FIELD = "unknown_field"
UNSUPPORTED_FIELD = "unsupported_field"

# The type of the validation error of an item or part of a kind that is not supported.
UNSUPPORTED_CONTENT = "unsupported_content"

# Of one body, counting the same field of many items once.
MAX_IGNORED_FIELDS = 32
# Of all bodies: beyond them nothing is logged any more.
MAX_LOGGED_KINDS = 1000
MAX_PATH_CHARACTERS = 100

_logged: set[str] = set()


class UnknownFields:
    """The unknown fields of one request.

    Args:
        refuses: whether fields that are not harmless are refused instead of ignored.

    Attributes:
        ignored: paths such as `tools[4].strict`, of a field of many items the first.
    """

    def __init__(self, refuses: bool) -> None:
        self.ignored: list[str] = []
        self._refuses = refuses
        self._kinds: set[str] = set()

    def take(self, body: BaseModel) -> None:
        """Take the unknown fields, and judge the provider's tools, out of a validated body.

        Raises:
            ApiError: 400 for a field that must not be ignored, or for too many of them.
        """
        for path, model in _models(body, ""):
            if isinstance(model, ProviderTool):
                self.ignore(path, f"a tool of type {quote(model.type)}, which a provider runs")
                continue
            extra = model.model_extra or {}
            for name, value in extra.items():
                self._judge(f"{path}.{name}" if path else name, value)
            extra.clear()

    def ignore(self, path: str, what: str = "not a field that this server knows") -> None:
        """Note that what is at `path` is left out of account.

        Raises:
            ApiError: 400 when the server refuses what it would ignore, or there is too much of it.
        """
        shown = excerpt(path, MAX_PATH_CHARACTERS)
        if self._refuses:
            raise bad_request(f"{shown} is {what}", shown, UNKNOWN_FIELD)
        kind = f"{_without_indices(shown)} is {what}"
        if kind in self._kinds:
            return
        if len(self._kinds) == MAX_IGNORED_FIELDS:
            raise bad_request(
                f"the body has more than {MAX_IGNORED_FIELDS} fields that this server does not "
                f"know, {shown} among them",
                shown,
                UNKNOWN_FIELD,
            )
        self._kinds.add(kind)
        self.ignored.append(shown)
        if kind not in _logged and len(_logged) < MAX_LOGGED_KINDS:
            _logged.add(kind)
            logger.warning("ignored in a request: %s", quote(kind))

    def _judge(self, path: str, value: Any) -> None:
        # Some APIs have the fields of others in an object of their own.
        field = _without_indices(path).removeprefix("sampling_params.")
        if field not in REFUSED:
            if not (asks_for_nothing(value) or _is_among(value, HARMLESS.get(field, ()))):
                self.ignore(path)
        elif value is not None and not _is_among(value, REFUSED[field]):
            raise bad_request(f"{path} is not supported by this server", path, UNSUPPORTED_FIELD)

    @property
    def headers(self) -> dict[str, str]:
        """The header that names what was ignored; none when nothing was."""
        if not self.ignored:
            return {}
        names = (re.sub(r"[^\w.\[\]$-]", "?", path, flags=re.ASCII) for path in self.ignored)
        return {IGNORED_FIELDS_HEADER: ", ".join(names)}


def asks_for_nothing(value: Any) -> bool:
    """Whether a value is null, false, empty, or a list or object of only such values."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif not (value is None or value is False or value == ""):
            return False
    return True


def _is_among(value: Any, harmless: tuple[Any, ...]) -> bool:
    # 1 is no true here, and 0 no false.
    return harmless is ANY or any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless
    )


def _without_indices(path: str) -> str:
    return re.sub(r"\[\d+\]", "[]", path)


def _models(value: Any, path: str) -> Iterator[tuple[str, BaseModel]]:
    """The models within a value, with their paths. Lists of models hold nothing else."""
    if isinstance(value, BaseModel):
        yield path, value
        for name, field in type(value).model_fields.items():
            spelled = field.alias or name
            yield from _models(getattr(value, name), f"{path}.{spelled}" if path else spelled)
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for index, item in enumerate(value):
            yield from _models(item, f"{path}[{index}]")
