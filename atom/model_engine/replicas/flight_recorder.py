"""The last steps of an engine, kept where they outlive it, for those who ask why it died.

They hold numbers alone: no prompt, no answer, no key.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path

import msgspec

from atom.environment import cache_dir
from atom.messages import EngineStats, StepReport
from atom.model_engine.processes.wire import StepProgress
from atom.version import __version__

logger = logging.getLogger(__name__)

# Steps that are kept of an engine, and files of dead ones.
_STEPS, _FILES = 200, 20


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """A step that has ended.

    Attributes:
        at: when its report was read, in seconds since 1970.
        seconds: that it took in the engine.
        num_tokens: that were computed, prompts and drafts included.
        num_outputs, num_new_tokens: sequences that got tokens or ended, and their new tokens.
        num_drafts, num_accepted: drafts verified, and accepted.
        num_running, num_waiting: sequences, after it.
        num_used_blocks: of the KV cache, after it.
        num_preempted, num_refused: sequences, in it.
        num_ended: sequences that ended.
        is_mixed: whether it computed prompts beside sequences that decode.
        is_replayed: whether the target's layers were a graph, or a program on a CPU.
    """

    at: float
    seconds: float
    num_tokens: int
    num_outputs: int
    num_new_tokens: int
    num_drafts: int
    num_accepted: int
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_preempted: int
    num_refused: int
    num_ended: int
    is_mixed: bool
    is_replayed: bool


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an engine that died.

    Attributes:
        reason: of its death.
        pid: its process id.
        running: the step that ran, as its last heartbeat said: tokens, and seconds by then; None if
            none did or its report came since.
        steps: the last ones, oldest first.
    """

    version: str
    reason: str
    pid: int
    at: float
    num_blocks: int
    running: tuple[int, float] | None
    steps: list[StepRecord]


class FlightRecorder:
    """Keeps the last steps of an engine in its frontend's memory, and writes them when it dies."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._steps: deque[StepRecord] = deque(maxlen=_STEPS)

    def note(self, report: StepReport) -> None:
        """Keep a step; reports without statistics, and of requests that were aborted, are none."""
        now, before = report.stats, self._stats
        if now is None or now.num_steps == before.num_steps:
            return
        self._stats = now
        drafts, earlier = now.spec_decode, before.spec_decode
        verified = accepted = 0
        if drafts is not None:
            verified, accepted = drafts.num_draft_tokens, drafts.num_accepted_tokens
        if earlier is not None:
            verified -= earlier.num_draft_tokens
            accepted -= earlier.num_accepted_tokens
        self._steps.append(
            StepRecord(
                time.time(),
                report.seconds,
                report.num_tokens,
                len(report.outputs),
                sum(len(output.token_ids) for output in report.outputs),
                verified,
                accepted,
                now.num_running,
                now.num_waiting,
                now.num_used_blocks,
                now.num_preemptions - before.num_preemptions,
                len(report.refused),
                sum(output.finish_reason is not None for output in report.outputs),
                now.num_mixed_steps > before.num_mixed_steps,
                now.num_replayed_decode_steps > before.num_replayed_decode_steps,
            )
        )

    def write(self, reason: str, pid: int, running: StepProgress | None) -> Path | None:
        """Write what is known of a dead engine, and drop the oldest files; None if nothing is known
        or it cannot be written, which the log says.
        """
        if not self._steps and running is None:
            return None
        step = None if running is None else (running.num_tokens, running.seconds)
        flight = Flight(
            version=__version__,
            reason=reason,
            pid=pid,
            at=time.time(),
            num_blocks=self._stats.num_blocks,
            running=step,
            steps=list(self._steps),
        )
        try:
            folder = cache_dir() / "flights"
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{pid}.json"
            path.write_bytes(msgspec.json.encode(flight))
            for old in sorted(folder.glob("*.json"))[:-_FILES]:
                old.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            logger.warning("the last steps of the engine cannot be kept: %s", error)
            return None
        return path


def read_flight(path: Path) -> Flight:
    """Raises:
    OSError, msgspec.MsgspecError: when it cannot be read, or is no such file.
    """
    return msgspec.json.decode(path.read_bytes(), type=Flight)
