"""The ranks of an engine meet at rank 0's store, and start together or not at all.

Each posts a card: who it is, and what must be the same on all. Rank 0 compares the cards and posts
the verdict, so that every rank fails with the same message. Afterwards the store stays: a process
that comes late, or as a rank that is there already, learns so and the engine goes on.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from atom.distributed.parallel_state import name_ranks
from atom.distributed.store import Store, await_key
from atom.options.fields import ConfigError

logger = logging.getLogger(__name__)

# For ranks that people or cluster managers start one after the other.
MEETING_SECONDS = 300.0
# For the others to read why the engine does not start.
_FAREWELL_SECONDS = 3.0
_POLL_SECONDS = 0.02
# How often rank 0 says whom it waits for.
_SAY_SECONDS = 5.0
_MOST_DIFFERENCES = 8

_WORLD, _VERDICT, _REFUSAL, _DUPLICATES, _FAREWELLS = (
    *("world", "verdict", "refusal", "duplicates", "farewells"),
)


class RankCard(msgspec.Struct, frozen=True):
    """What a rank says of itself.

    Attributes:
        machine: equal for ranks that can share memory.
        versions, variables, flags, checkpoint: what must be the same on all ranks, as name ->
            value.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    machine: str
    versions: dict[str, str] = {}
    variables: dict[str, str] = {}
    flags: dict[str, str] = {}
    checkpoint: dict[str, str] = {}

    @classmethod
    def own(
        cls,
        rank: int,
        world_size: int,
        versions: Mapping[str, str],
        variables: Mapping[str, str],
        flags: Mapping[str, str],
        checkpoint: Mapping[str, str],
    ) -> RankCard:
        """This process's."""
        host, pid = socket.gethostname(), os.getpid()
        common = dict(versions), dict(variables), dict(flags), dict(checkpoint)
        return cls(rank, world_size, host, pid, this_machine(), *common)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


class _Verdict(msgspec.Struct, frozen=True):
    error: str | None = None
    cards: list[RankCard] = []


def this_machine() -> str:
    """Equal for processes of one user on one machine and in one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        container = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux
        return f"{socket.gethostname()}/{os.getuid()}"
    return f"{boot}/{container}/{os.getuid()}"


def meet_as_first(
    store: Store,
    card: RankCard,
    check: Callable[[], None] = lambda: None,
    timeout_s: float = MEETING_SECONDS,
) -> list[RankCard]:
    """Rank 0's part: wait for all ranks and compare them.

    Args:
        check: called again and again; raises when a rank that this process started has died.

    Returns:
        The cards of all ranks, in order.

    Raises:
        ConfigError: saying what differs, which ranks are missing, or why one has refused.
    """
    _claim(store, card)
    store.set(_WORLD, str(card.world_size))
    try:
        cards = _gather(store, card, check, timeout_s)
        if differing := differences(cards):
            raise ConfigError(f"the ranks cannot work together: {'; '.join(differing)}")
    except Exception as error:
        refuse_all(store, str(error), card.world_size)
        raise
    store.set(_VERDICT, msgspec.json.encode(_Verdict(cards=cards)).decode())
    return cards


def refuse_all(store: Store, reason: str, world_size: int) -> None:
    """Tell all ranks that have come, or are coming, why the engine does not start."""
    store.set(_VERDICT, msgspec.json.encode(_Verdict(reason)).decode())
    end = time.monotonic() + _FAREWELL_SECONDS
    while time.monotonic() < end:
        came = sum(store.check([_card_key(rank)]) for rank in range(1, world_size))
        if store.add(_FAREWELLS, 0) >= came:
            return
        time.sleep(_POLL_SECONDS)


def meet(
    store: Store,
    card: RankCard,
    check: Callable[[], None] = lambda: None,
    timeout_s: float = MEETING_SECONDS,
) -> list[RankCard]:
    """The part of a rank that is not 0; the arguments are those of `meet_as_first`.

    Returns:
        The cards of all ranks, in order.

    Raises:
        ConfigError: when rank 0 refuses the engine, or this process has no place in it.
        RankStartError: when rank 0 has ended, or says nothing.
    """
    end = time.monotonic() + timeout_s
    world_size = int(await_key(store, _WORLD, end, check))
    if card.world_size != world_size:
        reason = (
            f"rank 0 expects {world_size} ranks, and {card} was started as one of "
            f"{card.world_size}; give all the same --tensor-parallel-size and WORLD_SIZE"
        )
        refuse(store, reason)
        raise ConfigError(reason)
    _claim(store, card)
    store.set(_card_key(card.rank), msgspec.json.encode(card).decode())
    # Rank 0 has a time-out of its own, which names the ranks that are missing.
    data = await_key(store, _VERDICT, end + timeout_s, check)
    verdict = msgspec.json.decode(data, type=_Verdict)
    if verdict.error is not None:
        store.add(_FAREWELLS, 1)
        raise ConfigError(verdict.error)
    return verdict.cards


def refuse(store: Store, reason: str) -> None:
    """Make rank 0, and with it all others, fail for a reason that this rank has found.

    Nothing happens once the engine has started.
    """
    store.set(_REFUSAL, reason)


def _claim(store: Store, card: RankCard) -> None:
    """Take the rank's place.

    Raises:
        ConfigError: when another process has it.
    """
    if store.add(f"claim/{card.rank}", 1) == 1:
        if card.rank == 0:
            store.set(_card_key(0), msgspec.json.encode(card).decode())
        return
    data = await_key(store, _card_key(card.rank), time.monotonic() + _FAREWELL_SECONDS)
    holder = msgspec.json.decode(data, type=RankCard)
    store.set(f"duplicate/{store.add(_DUPLICATES, 1)}", str(card))
    raise ConfigError(
        f"there is a {holder} already, and this is host {card.host}, pid {card.pid}: every process "
        f"needs a rank of its own, and every engine a MASTER_PORT (--master-port) of its own"
    )


def _gather(
    store: Store, card: RankCard, check: Callable[[], None], timeout_s: float
) -> list[RankCard]:
    begun = said_at = time.monotonic()
    cards = {0: card}
    missing = list(range(1, card.world_size))
    while missing:
        if store.check([_REFUSAL]):
            raise ConfigError(store.get(_REFUSAL).decode())
        check()
        for rank in missing:
            if store.check([_card_key(rank)]):
                cards[rank] = msgspec.json.decode(store.get(_card_key(rank)), type=RankCard)
        missing = [rank for rank in missing if rank not in cards]
        now = time.monotonic()
        if missing and now > begun + timeout_s:
            raise ConfigError(_who_is_missing(store, cards, missing, timeout_s))
        if missing and now > said_at + _SAY_SECONDS:
            said_at, waited = now, now - begun
            logger.info(
                "waiting for %s of %d to come, for %.0f s",
                *(name_ranks(missing), card.world_size, waited),
            )
        time.sleep(_POLL_SECONDS if missing else 0)
    return [cards[rank] for rank in range(card.world_size)]


def _who_is_missing(
    store: Store, cards: Mapping[int, RankCard], missing: Sequence[int], seconds: float
) -> str:
    here = ", ".join(str(card) for _, card in sorted(cards.items()))
    text = f"{name_ranks(missing)} of {len(cards) + len(missing)} did not come in {seconds:g} s; "
    text += f"here are {here}"
    twice = [
        store.get(f"duplicate/{number}").decode()
        for number in range(1, store.add(_DUPLICATES, 0) + 1)
    ]
    if twice:
        text += f"; refused, because their ranks were taken, were {', '.join(twice)}"
    return text


def differences(cards: Sequence[RankCard]) -> list[str]:
    """What is not the same on all ranks, one phrase each."""
    found = []
    for kind in ("versions", "variables", "flags", "checkpoint"):
        values = [getattr(card, kind) for card in cards]
        for name in dict.fromkeys(name for each in values for name in each):
            ranks = defaultdict(list)
            for card, each in zip(cards, values, strict=True):
                ranks[each.get(name, "absent")].append(card)
            if len(ranks) > 1:
                found.append(f"{name} is " + " but ".join(map(_on_ranks, ranks.items())))
    more = len(found) - _MOST_DIFFERENCES
    return found if more <= 0 else [*found[:-more], f"and {more} more differ"]


def _on_ranks(value: tuple[str, Sequence[RankCard]]) -> str:
    text, cards = value
    hosts = ", ".join(dict.fromkeys(card.host for card in cards))
    return f"{text} on {name_ranks([card.rank for card in cards])} ({hosts})"


def _card_key(rank: int) -> str:
    return f"card/{rank}"
