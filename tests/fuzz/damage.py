"""Damages data at random, by what it is: JSON, bytes."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

_INTEGERS = (-1, 0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 10**30)
_ODD: tuple[Any, ...] = (
    *(None, True, False, "", "a", "é\u0000", "x" * 300, 0.5, -0.0, 1e308, float("nan")),
    *([], {}, [[]], [None], {"": None}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "../x", "1", "F32", "I8"),
)


def odd_value(random: Random) -> Any:
    """Something that a field seldom is."""
    if random.random() < 0.5:
        return random.choice(_INTEGERS)
    return copy.deepcopy(random.choice(_ODD))


def damaged_json(value: Any, random: Random, times: int | None = None) -> Any:
    """A copy with one to three parts changed."""
    value = copy.deepcopy(value)
    for _ in range(times or random.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return odd_value(random)
        holder, key = random.choice(places)
        _damage_place(holder, key, random)
    return value


def _places(value: Any) -> Any:
    pending = [value]
    while pending:
        holder = pending.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, item in list(items):
            yield holder, key
            if isinstance(item, (dict, list)):
                pending.append(item)


def _damage_place(holder: Any, key: Any, random: Random) -> None:
    item = holder[key]
    kind = random.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(item, int):
        holder[key] = item + random.choice((-1, 1, 2, 64, -item, item))
    elif kind == 2 and isinstance(holder, dict):
        holder[str(odd_value(random))[:300]] = item
    elif kind == 3 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(item))
    elif kind == 4:
        holder[key] = copy.deepcopy(random.choice([h[k] for h, k in _places({"": holder})]))
    else:
        holder[key] = odd_value(random)


def damaged_bytes(data: bytes, random: Random, first: int | None = None) -> bytes:
    """A copy that is cut, longer, or has some bytes changed.

    Args:
        first: bytes in which most changes fall, such as a header.
    """
    changed = bytearray(data)
    kind = random.randrange(8)
    if kind == 0:
        return bytes(changed[: random.randrange(len(changed) + 1)])
    if kind == 1:
        return bytes(changed) + random.randbytes(random.choice((1, 8, 4096)))
    if kind == 2:
        start = random.randrange(len(changed))
        del changed[start : start + random.choice((1, 4, 8, 100))]
        return bytes(changed)
    for _ in range(random.choice((1, 1, 2, 8))):
        end = first if first is not None and random.random() < 0.9 else len(changed)
        at = random.randrange(end)
        if kind in (3, 4):  # a length or a number
            size = random.choice((4, 8))
            number = random.choice(_INTEGERS) % (1 << 8 * size)
            changed[at : at + size] = number.to_bytes(size, "little")
        else:
            changed[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
    return bytes(changed)
