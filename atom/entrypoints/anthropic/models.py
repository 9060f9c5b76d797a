"""`/v1/models` as Anthropic's clients read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from atom.entrypoints.http.errors import bad_request
from atom.quoting import quote

# Its clients send it with every request, others never.
VERSION_HEADER = "anthropic-version"

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


def model_info(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """A model's description.

    Args:
        created: seconds since the epoch.
    """
    return {
        "type": "model",
        "id": name,
        "display_name": name.rstrip("/").rpartition("/")[2],
        "created_at": datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "capabilities": None,
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def model_page(models: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of `models`, as `limit`, `after_id` and `before_id` choose it.

    Raises:
        ApiError: 400 for a limit or id that cannot be.
    """
    limit = _limit(query.get("limit"))
    names = [model["id"] for model in models]
    first, last = 0, len(models)
    if "after_id" in query:
        first = _place(query["after_id"], names, "after_id") + 1
    if "before_id" in query:
        last = _place(query["before_id"], names, "before_id")
    is_backward = "before_id" in query and "after_id" not in query
    chosen = models[first:last]
    page = chosen[-limit:] if is_backward else chosen[:limit]
    return {
        "data": page,
        "has_more": len(page) < len(chosen),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_LIMIT
    # More digits than any limit has are not read as a number.
    if given.isascii() and given.isdecimal() and len(given) <= 4 and 1 <= int(given) <= MAX_LIMIT:
        return int(given)
    raise bad_request(f"limit must be in [1, {MAX_LIMIT}], got {quote(given)}", "limit")


def _place(name: str, names: Sequence[str], param: str) -> int:
    if name not in names:
        raise bad_request(f"{param}: the model {quote(name)} does not exist", param)
    return names.index(name)
