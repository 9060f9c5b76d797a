"""Which requests a frontend takes, in which turn they run, and when another one may come.

No request is taken beyond the bounds of the queue. Those that are taken run by priority, and of one
priority the clients take turns by the tokens that were computed for them: start-time fair queueing
(Goyal, Vin, Cheng, 1996), whose cost is the prompt when a request comes, and its answer when it
ends. A client alone is served in the order of arrival.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# Ends of requests that the rate is measured over.
_NUM_MEASURED = 128
_LONGEST_WAIT_SECONDS = 3600


class QueueFullError(RuntimeError):
    """More is waiting than the options allow.

    Attributes:
        retry_after: whole seconds after which there is room again, at the rate of late.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClientFullError(QueueFullError):
    """The client has as many requests as one may have."""


@dataclass(frozen=True)
class AdmissionLimits:
    """Attributes:
    max_waiting_requests: sequences that wait to be scheduled; None for no limit.
    max_waiting_tokens: tokens of prompts whose first token has not come; a prompt is always
        taken where none waits.
    max_requests_per_key: sequences of one client that run or wait.
    """

    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    max_requests_per_key: int | None = None


NO_LIMITS = AdmissionLimits()


@dataclass(eq=False)
class Ticket:
    """A request that was taken.

    Attributes:
        turn: the lowest runs first.
        num_output_tokens: of its answers so far.
    """

    client: str
    num_sequences: int
    num_prompt_tokens: int
    turn: int
    has_begun: bool = False
    num_output_tokens: int = 0


@dataclass
class _Ends:
    """When sequences ended of late, of all clients."""

    since: float
    events: deque[tuple[float, Ticket]] = field(default_factory=deque)

    def add(self, now: float, ticket: Ticket) -> None:
        self.events.append((now, ticket))
        if len(self.events) > _NUM_MEASURED:
            self.since, _ = self.events.popleft()


class Admission:
    """The requests of all clients that have not ended. Not thread-safe.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self, limits: AdmissionLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._num_live: Counter[str] = Counter()
        self._ends = _Ends(clock())
        # What the last request to begin had as its turn, and what each client's next one has.
        self._turn = 0
        self._next_turns: dict[str, int] = {}
        self.num_waiting_tokens = 0

    @contextmanager
    def admit(
        self, client: str, num_sequences: int, num_prompt_tokens: int, num_waiting: int
    ) -> Iterator[Ticket]:
        """Take a request until the context is left.

        Args:
            num_waiting: sequences that wait to be scheduled; negative where more could run.

        Raises:
            QueueFullError: when it may not be taken.
        """
        self._check(client, num_sequences, num_prompt_tokens, num_waiting)
        if not self._num_live:
            # What ended before nobody asked says nothing of how fast requests end.
            self._ends = _Ends(self._clock())
        turn = max(self._turn, self._next_turns.get(client, 0))
        ticket = Ticket(client, num_sequences, num_prompt_tokens, turn)
        self._num_live[client] += num_sequences
        self.num_waiting_tokens += num_prompt_tokens
        self._next_turns[client] = turn + num_prompt_tokens
        try:
            yield ticket
        finally:
            self._leave(ticket)

    def begin(self, ticket: Ticket) -> None:
        """Its first token has come; only the first call has an effect."""
        if ticket.has_begun:
            return
        ticket.has_begun = True
        self.num_waiting_tokens -= ticket.num_prompt_tokens
        self._turn = max(self._turn, ticket.turn)

    def _check(
        self, client: str, num_sequences: int, num_prompt_tokens: int, num_waiting: int
    ) -> None:
        limits = self._limits
        most = limits.max_requests_per_key
        if most is not None and (live := self._num_live[client]) + num_sequences > most:
            raise ClientFullError(
                f"{live} sequences of this API key run or wait and {num_sequences} more would "
                f"exceed max_requests_per_key={most}; try again later",
                self._seconds_until(live + num_sequences - most, lambda t: t.num_sequences, client),
            )
        most = limits.max_waiting_requests
        if most is not None and num_waiting + num_sequences > most:
            raise QueueFullError(
                f"{max(0, num_waiting)} sequences are waiting and {num_sequences} more would "
                f"exceed max_waiting_requests={most}; try again later",
                self._seconds_until(num_waiting + num_sequences - most, lambda t: t.num_sequences),
            )
        most, waiting = limits.max_waiting_tokens, self.num_waiting_tokens
        if most is not None and waiting and waiting + num_prompt_tokens > most:
            raise QueueFullError(
                f"prompts of {waiting} tokens are waiting and {num_prompt_tokens} more would "
                f"exceed max_waiting_tokens={most}; try again later",
                self._seconds_until(
                    min(waiting, waiting + num_prompt_tokens - most), lambda t: t.num_prompt_tokens
                ),
            )

    def _leave(self, ticket: Ticket) -> None:
        if not ticket.has_begun:
            self.num_waiting_tokens -= ticket.num_prompt_tokens
        self._ends.add(self._clock(), ticket)
        client = ticket.client
        self._next_turns[client] += ticket.num_output_tokens
        self._num_live[client] -= ticket.num_sequences
        if not self._num_live[client]:
            del self._num_live[client]
            if self._next_turns[client] <= self._turn:
                del self._next_turns[client]

    def _seconds_until(
        self, excess: int, weigh: Callable[[Ticket], int], client: str | None = None
    ) -> int:
        """Whole seconds until so much has ended at the rate of late.

        Args:
            client: of whom, if not of all.
        """
        passed = self._clock() - self._ends.since
        tickets = [t for _, t in self._ends.events if client is None or t.client == client]
        ended = sum(map(weigh, tickets))
        # While nothing has ended, it takes at least as long again as it has taken.
        seconds = passed * excess / ended if ended else passed
        return min(max(1, math.ceil(seconds)), _LONGEST_WAIT_SECONDS)
