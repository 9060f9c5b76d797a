"""What the first step of a shape costs, where steps are recorded when they recur."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

# Share of the steps with a number of sequences that will be of one shape: alone, and with others.
_RECURRENCE_ALONE, _RECURRENCE = 1 / 2, 1 / 8


class StepShape(NamedTuple):
    """Steps of the same shape are replayed alike.

    Attributes:
        num_verified: drafts that it verifies in all.
        made: drafts that it makes of each sequence.
    """

    num_sequences: int
    num_verified: int
    made: int


class FirstRuns:
    """Knows which shapes were run, and what steps of others take more.

    Args:
        seconds: what a step of a new shape takes more than others like it; None where it takes no
            more.
        most: shapes that are kept, the ones that were run last. All others are new again.
    """

    def __init__(self, seconds: Callable[[], float] | None = None, most: int = 0) -> None:
        self._seconds = seconds
        self._most = most
        self._shapes: OrderedDict[StepShape, None] = OrderedDict()
        self._num_run: Counter[int] = Counter()  # by number of sequences

    @property
    def is_costly(self) -> bool:
        """Whether steps of new shapes take more."""
        return self._seconds is not None

    def ran(self, shape: StepShape, times: int = 1) -> None:
        """So many steps of the shape were run."""
        self._num_run[shape.num_sequences] += times
        self._shapes[shape] = None
        self._shapes.move_to_end(shape)
        if len(self._shapes) > self._most:
            self._shapes.popitem(last=False)

    def is_new(self, shape: StepShape) -> bool:
        """Whether the next step of the shape takes more."""
        return self._seconds is not None and shape not in self._shapes

    def seconds(self, shape: StepShape) -> float:
        """What the next step of the shape takes more."""
        return 0.0 if self._seconds is None or shape in self._shapes else self._seconds()

    def share(self, shape: StepShape) -> float:
        """The same, spread over the steps in which it is likely to recur: a share of as many as
        were run with as many sequences.
        """
        share = _RECURRENCE_ALONE if shape.num_sequences == 1 else _RECURRENCE
        return self.seconds(shape) / (1 + share * self._num_run[shape.num_sequences])
