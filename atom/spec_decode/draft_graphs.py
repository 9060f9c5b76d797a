"""A proposer's work in steps that decode, captured: its first pass with the chain or the block."""

from __future__ import annotations

from collections.abc import Callable

from atom.graphs.capture import CaptureBackend
from atom.graphs.captured import CapturedWork
from atom.graphs.runner import GraphKey
from atom.spec_decode.base import DraftKey, Proposal


class DraftGraphs:
    """Captured proposals.

    Args:
        numbers: of drafts to capture.
    """

    def __init__(self, backend: CaptureBackend, numbers: tuple[int, ...]) -> None:
        self._work = CapturedWork(backend)
        self._numbers = numbers

    def keys_of(self, target: GraphKey) -> list[DraftKey]:
        """The graphs to capture behind one of the target's."""
        kinds = [(n, races) for n in self._numbers for races in ((False, True) if n else (False,))]
        return [DraftKey(target, *kind) for kind in kinds]

    def find(self, target: GraphKey, num_drafts: int, *, races: bool) -> DraftKey | None:
        """The graph that makes such drafts; None if none was captured."""
        key = DraftKey(target, num_drafts, races and num_drafts > 0)
        return key if key in self._work else None

    def capture(self, key: DraftKey, propose: Callable[[], Proposal]) -> None:
        """Capture what makes the proposal, of all the graph's sequences."""
        self._work.capture(key, lambda: propose().tensors)

    def replay(self, key: DraftKey, num_sequences: int) -> Proposal:
        """The proposal for so many sequences, valid until the next one."""
        return Proposal(*(kept[:num_sequences] for kept in self._work.replay(key)))

    def release(self) -> None:
        """Drop all graphs."""
        self._work.release()
