"""Command lines of other engines as ours: known flags of theirs are replaced, dropped or refused.

A flag that the program has itself is never touched.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from atom.command_line.foreign_flags import BY_NAME, VLLM, Fate, ForeignFlag, Takes

_log = logging.getLogger(__name__)


def find(flag: str) -> tuple[ForeignFlag, bool] | None:
    """The entry of a flag as it is typed, and whether it says the opposite (`--no-...`).

    `--compilation_config.pass_config.x` is `--compilation-config`.
    """
    name = _kebab(flag).partition(".")[0]
    if (entry := BY_NAME.get(name)) is not None:
        return entry, False
    positive = BY_NAME.get("--" + name.removeprefix("--no-"))
    if name.startswith("--no-") and positive is not None and positive.takes is Takes.NOTHING:
        return positive, True
    return None


def _kebab(flag: str) -> str:
    return flag.replace("_", "-") if flag.startswith("--") else flag


def as_ours(
    words: Sequence[str], known: Collection[str], refuse: Callable[[str], NoReturn]
) -> list[str]:
    """A command line with the flags of other engines replaced by ours, or dropped with a warning.

    Args:
        known: the program's own flags.
        refuse: is told of a flag that cannot be honoured.
    """
    return list(_as_ours(words, known, refuse))


def _as_ours(
    words: Sequence[str], known: Collection[str], refuse: Callable[[str], NoReturn]
) -> Iterator[str]:
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word == "--":
            yield from words[place - 1 :]
            return
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag not in known and _kebab(flag) in known:
            flag = _kebab(flag)
        found = find(flag) if flag.startswith("-") and flag not in known else None
        _refuse_keys(flag, known, refuse)
        if found is None:
            yield f"{flag}{equals}{value}"
            continue
        entry, is_opposite = found
        count = 0 if equals else _num_values(entry, words[place:])
        values = [value] if equals else list(words[place : place + count])
        place += count
        yield from _replaced(flag, entry, is_opposite, values, known, refuse)


def _refuse_keys(flag: str, known: Collection[str], refuse: Callable[[str], NoReturn]) -> None:
    """vLLM's way to give one key of a JSON object as a flag."""
    name, dot, key = flag.partition(".")
    entry = BY_NAME.get(name)
    ours = entry.says if entry is not None and entry.fate is Fate.SAME else _kebab(name)
    if flag.startswith("-") and dot and ours in known:
        refuse(f"{flag} ({VLLM}): {ours} takes its keys as one object, '{{\"{key}\": ...}}'")


def _num_values(entry: ForeignFlag, rest: Sequence[str]) -> int:
    """How many of the words that follow belong to a flag."""
    if entry.takes is Takes.NOTHING or not rest:
        return 0
    if entry.takes is Takes.ONE:
        return 0 if rest[0].startswith("--") else 1
    values = next((n for n, word in enumerate(rest) if word.startswith("-")), len(rest))
    return min(values, 1) if entry.takes is Takes.AT_MOST_ONE else values


def _replaced(
    flag: str,
    entry: ForeignFlag,
    is_opposite: bool,
    values: Sequence[str],
    known: Collection[str],
    refuse: Callable[[str], NoReturn],
) -> Iterator[str]:
    """What stands in our command line for one flag."""
    said = f"{flag} ({entry.engine})"
    if values and all(value in entry.harmless for value in values):
        _log.warning("%s %s is what happens here anyway", said, " ".join(values))
    elif entry.fate is Fate.NEEDLESS:
        _log.warning("%s has no effect: %s", said, entry.says)
    elif entry.fate is Fate.REFUSED:
        if not is_opposite:
            refuse(f"{said}: {entry.says}")
        _log.warning("%s is what happens here anyway", said)
    elif is_opposite and "=" in entry.says:
        _log.warning("%s is what happens here anyway", said)
    elif (ours := _opposite(entry.says) if is_opposite else entry.says).split("=")[0] not in known:
        refuse(f"{said} is {ours}, which is not for this program")
    elif not values:
        yield ours
    else:
        for value in values:
            for each in _listed(value) if entry.takes is Takes.SEVERAL else [value]:
                yield f"{ours}={each}"


def _opposite(switch: str) -> str:
    return f"--{switch[5:]}" if switch.startswith("--no-") else f"--no-{switch[2:]}"


def _listed(value: str) -> list[str]:
    try:
        content = json.loads(value)
    except json.JSONDecodeError:
        return [value]
    return [str(each) for each in content] if isinstance(content, list) else [value]


def words_of(name: str, value: Any) -> list[str] | None:
    """A line of a file with flags as words of a command line; None when no engine has the flag."""
    flag = f"--{name}"
    if find(flag) is None:
        return None
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, (Mapping, list)):
        return [f"{flag}={json.dumps(value)}"]
    return [f"{flag}={value}"]
