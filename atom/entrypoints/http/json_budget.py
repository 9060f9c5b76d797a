"""How many values JSON text may hold: parsing it costs time and memory for each."""

from __future__ import annotations

import json
from typing import Any

from atom.entrypoints.http.errors import bad_request

# Objects, arrays and keys. Each costs microseconds, in which the interpreter does nothing else.
MAX_JSON_PARTS = 65_536
# Items and members, plain numbers too: as many as a prompt may have token ids.
MAX_JSON_VALUES = 1_000_000

_SLICE_BYTES = 2**16


class JsonBudget:
    """What the JSON of one request may still hold."""

    def __init__(self) -> None:
        self._parts = MAX_JSON_PARTS
        self._values = MAX_JSON_VALUES

    def spend(self, data: bytes) -> None:
        """Count what stands outside the strings of JSON text, valid or not, before it is parsed.

        Raises:
            ApiError: 400 when the budget does not suffice.
        """
        # Strings end at the next quote once escapes are out of the way.
        text = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        is_inside = False
        for start in range(0, len(text), _SLICE_BYTES):
            pieces = text[start : start + _SLICE_BYTES].split(b'"')
            outside = b"".join(pieces[is_inside::2])
            is_inside ^= len(pieces) % 2 == 0
            self._parts -= sum(map(outside.count, (b"{", b"[", b":")))
            self._values -= outside.count(b",")
            if self._parts < 0 or self._values < 0:
                raise bad_request(
                    f"the body has more than {MAX_JSON_PARTS} objects, arrays and keys, or more "
                    f"than {MAX_JSON_VALUES} values; send several requests",
                    code="too_many_values",
                )

    def loads(self, text: str) -> Any:
        """Parse JSON text that came within a body.

        Raises:
            ApiError: 400 when the budget does not suffice.
            ValueError: for text that is no JSON, or too deep.
        """
        self.spend(text.encode("utf-8", "surrogatepass"))
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
