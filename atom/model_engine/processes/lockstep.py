"""Keeps engines that share experts at the same step: every step is one of all."""

from __future__ import annotations

import msgspec

from atom.batch import RankStep
from atom.distributed.parallel_state import ParallelGroup
from atom.messages import EngineDeadError

_SHORTEST_MS, _LONGEST_MS = 2, 20


class Lockstep:
    """What the engines agree on before each step, by exchanging integers.

    - If any engine has a batch, all run a step; those without one compute a padding row.
    - If the draft models share experts, too, all make as many drafts as the one that wants most.
    - An engine that ends says so, and the others run no step any more.

    An engine alone agrees with itself.

    Args:
        engines: the first ranks of all engines.
        drafts_share_experts: whether the draft model shares experts, too.
    """

    def __init__(self, engines: ParallelGroup, drafts_share_experts: bool) -> None:
        self._engines = engines
        self._drafts_share_experts = drafts_share_experts
        self._num_quiet = 0
        self._has_ended = False

    @property
    def is_coupled(self) -> bool:
        return self._engines.size > 1

    @property
    def max_idle_ms(self) -> int | None:
        """How long an engine without work may wait for requests before the next exchange.

        None for as long as it likes. It grows while no engine has work.
        """
        if not self.is_coupled or self._has_ended:
            return None
        if not self._num_quiet:
            return 0
        return min(_SHORTEST_MS << min(self._num_quiet - 1, 8), _LONGEST_MS)

    def agree(self, rank_step: RankStep) -> RankStep:
        """What all ranks do in the next step, from what this engine's would do alone.

        Raises:
            EngineDeadError: when another engine has ended or does not come.
        """
        if not self.is_coupled:
            return rank_step
        has_work = bool(rank_step.batch.sequences)
        every = [] if self._has_ended else self._exchange(has_work, rank_step.num_drafts, False)
        if self._has_ended or any(has_ended for _, _, has_ended in every):
            self._has_ended = True
            if has_work:
                raise EngineDeadError("another engine that shares the experts has ended")
            return rank_step
        anyone = any(others for others, _, _ in every)
        self._num_quiet = 0 if anyone else self._num_quiet + 1
        if self._drafts_share_experts:
            most = max(num_drafts for _, num_drafts, _ in every)
            rank_step = msgspec.structs.replace(rank_step, num_drafts=most)
        return msgspec.structs.replace(rank_step, is_idle=anyone and not has_work)

    def end(self) -> None:
        """Tell the other engines that this one ends."""
        if self.is_coupled and not self._has_ended:
            self._has_ended = True
            try:
                self._exchange(False, 0, True)
            except EngineDeadError:
                return  # they ended first

    def _exchange(self, *values: int) -> list[list[int]]:
        try:
            return self._engines.exchange(values)
        except RuntimeError as error:
            raise EngineDeadError(
                f"engine {self._engines.rank} shares experts with {self._engines.size - 1} other "
                f"engines, and not all of them came to a step: {error}"
            ) from error
