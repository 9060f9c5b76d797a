"""References within a JSON schema: JSON pointers (RFC 6901) in a URI's fragment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_INDEX = re.compile(r"0|[1-9][0-9]{0,17}")


def resolve_pointer(root: Any, reference: str) -> Any:
    """What `#` or `#/...` names in JSON data; None where nothing is there.

    `~1` stands for a slash, `~0` for a tilde, `%` and two digits for a byte of UTF-8. A name with
    percent signs that were not escaped is found, too, where there is none that they stand for.
    """
    target = root
    for step in reference[1:].split("/")[1:]:
        if isinstance(target, list):
            if not _INDEX.fullmatch(step) or int(step) >= len(target):
                return None
            target = target[int(step)]
        elif isinstance(target, Mapping):
            names = (_name(unquote(step)), _name(step))
            name = next((name for name in names if name in target), None)
            if name is None:
                return None
            target = target[name]
        else:
            return None
    return target


def _name(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")
