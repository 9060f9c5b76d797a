"""What the first step of a shape costs, where steps are recorded when they recur."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple


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
        cost: what a step of a new shape takes more than others like it, as a share of a step; 0
            where it takes no more.
        most: shapes that are kept, the ones that were run last. All others are new again.
    """

    def __init__(self, cost: float = 0.0, most: int = 0) -> None:
        self.cost = cost
        self._most = most
        self._shapes: OrderedDict[StepShape, None] = OrderedDict()
        self._num_run: Counter[int] = Counter()  # by number of sequences

    def ran(self, shape: StepShape) -> None:
        self._num_run[shape.num_sequences] += 1
        self._shapes[shape] = None
        self._shapes.move_to_end(shape)
        if len(self._shapes) > self._most:
            self._shapes.popitem(last=False)

    def cost_of(self, shape: StepShape) -> float:
        """What the next step of the shape takes more, as a share of it."""
        return 0.0 if shape in self._shapes else self.cost

    def share_of(self, shape: StepShape) -> float:
        """The same, spread over as many steps as were run with as many sequences."""
        return self.cost_of(shape) / (1 + self._num_run[shape.num_sequences])
