"""The canary without an engine: steps made by hand, and all of what it says of each wrong read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from atom.batch import NewSequence, ScheduledBatch, ScheduledSequence, SequenceResult
from atom.kv_cache import canary as canary_file
from atom.kv_cache.canary import KVCanary
from atom.messages import EngineDeadError
from atom.model_ops.attention.metadata import CacheTensor, KVCacheTensor, LatentCacheTensor
from atom.sampling_params import SamplingParams

SIZE = 4
NUM_BLOCKS = 8
PROMPT = [11, 12, 13, 14, 15, 16]


@pytest.fixture(autouse=True)
def watch_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SLOTS_HASHED", "_BLOCKS_CHECKED", "_SLOTS_CHECKED"):
        monkeypatch.setattr(canary_file, name, 64)


def key_and_value() -> KVCacheTensor:
    return KVCacheTensor(*(torch.zeros(NUM_BLOCKS, SIZE, 1, 2) for _ in range(2)))


class Steps:
    """A canary, the cache that it watches, and sequences by their ids."""

    def __init__(self, layers: Sequence[CacheTensor] | None = None, **options: Any) -> None:
        self.layers = [key_and_value(), key_and_value()] if layers is None else layers
        options = {"checks_successors": True, "raises": True, **options}
        self.canary = KVCanary(self.layers, NUM_BLOCKS, SIZE, **options)
        self._blocks: dict[str, list[int]] = {}
        self._num_written = 0

    def start(self, id: str, prompt: list[int], blocks: list[int], **more: Any) -> None:
        """A first step, from `start` on; the last row is sampled."""
        more = {"start": 0, "says": [90], "salt": "", **more}
        new = NewSequence(id, ord(id), prompt, [], SamplingParams(), 0, more.pop("salt"))
        fed = more.pop("fed", prompt[more["start"] :])
        self._blocks[id] = []
        self.step(id, fed, blocks=blocks, new=[new], **more)

    def step(
        self,
        id: str,
        fed: list[int],
        start: int,
        says: list[int],
        blocks: Sequence[int] = (),
        drafts: int = 0,
        table: list[int] | None = None,
        failure: str | None = None,
        ahead_by: int | None = None,
        new: Sequence[NewSequence] = (),
    ) -> None:
        """A step of one sequence, that says `says`; attention reads `table`, if not its own. One
        that is ahead starts by so many tokens sooner than it was thought to.
        """
        known = self._blocks[id]
        known += blocks
        table = known if table is None else table
        part = ScheduledSequence(
            id,
            ord(id),
            fed if ahead_by is None else [0] * len(fed),
            start + (ahead_by or 0),
            list(blocks),
            len(table),
            bool(says),
            drafts,
            is_ahead=ahead_by is not None,
        )
        self.write([known[p // SIZE] * SIZE + p % SIZE for p in range(start, start + len(fed))])
        self.canary.check(
            ScheduledBatch([part], list(new), []),
            np.array([table], dtype=np.int32),
            [SequenceResult(says, failure=failure)],
        )

    def write(self, slots: list[int]) -> None:
        """As attention does: other numbers each time."""
        for slot in slots:
            self._num_written += 1
            for layer in self.layers:
                for part in parts_of(layer):
                    part[slot // SIZE, slot % SIZE] = self._num_written

    def free(self, id: str) -> None:
        self.canary.check(ScheduledBatch([], [], [ord(id)]), np.zeros((0, 0), np.int32), [])

    @property
    def hashed(self) -> list[int]:
        return sorted(self.canary._hashes)


def parts_of(layer: CacheTensor) -> list[torch.Tensor]:
    return [layer.key, layer.value] if isinstance(layer, KVCacheTensor) else [layer.latent]


def found(*said: str) -> Any:
    """The first wrong read ends the engine, with exactly this."""
    message = "^the KV cache is wrong: 'SEQ' at position AT SAID$"
    for name, what in zip(("SEQ", "AT", "SAID"), said, strict=True):
        message = message.replace(name, what)
    return pytest.raises(EngineDeadError, match=message)


def first_blocks(steps: Steps) -> None:
    """Sequence a: 6 tokens of a prompt in blocks 2 and 5, of which 5 is half full."""
    steps.start("a", PROMPT, [2, 5])


def test_it_is_silent_where_steps_are_right() -> None:
    steps = Steps()
    steps.start("a", PROMPT, [2], fed=PROMPT[:4], says=[])
    steps.step("a", PROMPT[4:], 4, [17], blocks=[5])
    # Two drafts of which one is accepted, then none of two, and then both.
    steps.step("a", [17, 18, 50], 6, [18, 19], blocks=[7], drafts=2)
    assert steps.hashed == [8, 9, 10, 11, 20, 21, 22, 23]
    steps.step("a", [19, 50, 51], 8, [20], drafts=2)
    # Launched before that was known, and where both drafts were right they start later.
    steps.step("a", [20, 50], 9, [21], drafts=1, ahead_by=2)
    steps.step("a", [21, 22], 10, [22, 23], blocks=[1], drafts=1, ahead_by=1)
    steps.step("a", [23, 24, 25], 12, [24, 25, 26], drafts=2)
    assert steps.hashed == [4, 5, 6, 8, 9, 10, 11, 20, 21, 22, 23, 28, 29, 30, 31]
    # What steps computed is found as prompts are, with all that follows.
    text = list(range(11, 27))
    steps.start("b", text, [2, 5, 7, 3], start=12)
    assert steps.canary.num_wrong == 0


def test_an_end_in_failure_counts_all_tokens_before_it() -> None:
    steps = Steps()
    first_blocks(steps)
    steps.step("a", [90, 91, 92], 6, [91], blocks=[7], drafts=2, failure="no token can be chosen")
    assert steps.hashed == [8, 9, 10, 11, 20, 21, 22, 23]
    steps.free("a")
    assert not steps.canary._rows
    assert steps.canary.num_wrong == 0


@pytest.mark.parametrize(
    ("table", "at", "what"),
    [
        ([2, 7], 4, "is read in block 7, but was given 5"),
        ([3, 7], 0, "is read in block 3, but was given 2"),
        ([2], 4, "is read in block None, but was given 5"),
        ([2, 5, 7], 8, "is read in block 7, but was given None"),
    ],
)
def test_a_table_that_is_not_what_was_given(table: list[int], at: int, what: str) -> None:
    steps = Steps()
    first_blocks(steps)
    with found("a", str(at), what):
        steps.step("a", [90], 6, [91], table=table)


def test_a_slot_that_another_sequence_wrote_to() -> None:
    steps = Steps(checks_successors=False)
    first_blocks(steps)
    # It goes on in the same block with another token.
    steps.start("b", [*PROMPT[:5], 70], [2, 5], start=5)
    with found("a", "5", r"\(slot 21 of block 5\) holds the KV of other tokens"):
        steps.step("a", [90], 6, [91])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", [0, 1])
def test_bytes_that_changed(layer: int, part: int) -> None:
    steps = Steps()
    first_blocks(steps)
    parts_of(steps.layers[layer])[part][5, 1, 0, 1] += 1
    with found("a", "5", r"\(slot 21 of block 5\) holds other bytes than were written"):
        steps.step("a", [90], 6, [91])


def test_latents_are_watched_and_layers_without_shared_blocks_are_not() -> None:
    latent = LatentCacheTensor(torch.zeros(NUM_BLOCKS, SIZE, 3))
    steps = Steps([latent])
    first_blocks(steps)
    latent.latent[2, 3, 2] += 1
    with found("a", "3", r"\(slot 11 of block 2\) holds other bytes than were written"):
        steps.step("a", [90], 6, [91])
    none = Steps([])
    first_blocks(none)
    assert none.hashed == []
    with found("a", "4", "is read in block 7, but was given 5"):
        none.step("a", [90], 6, [91], table=[2, 7])


def test_cached_blocks_are_of_the_tokens_that_they_are_matched_for() -> None:
    steps = Steps()
    first_blocks(steps)
    steps.start("b", [*PROMPT[:5], 70], [2, 6], start=4)
    with found("c", "2", r"\(slot 10 of block 2\) was matched, but holds no KV of these tokens"):
        steps.start("c", [11, 12, 70, 71, 15], [2, 3], start=4)
    with found("d", "0", r"\(slot 8 of block 2\) was matched, but holds no KV of these tokens"):
        steps.start("d", PROMPT, [2, 3], start=4, salt="another")
    with found("e", "0", r"\(slot 4 of block 1\) was matched, but holds no KV of these tokens"):
        steps.start("e", PROMPT, [1, 3], start=4)


def test_cached_blocks_are_followed_by_the_token_that_their_kv_depends_on() -> None:
    what = r"\(slot 11 of block 2\) was matched before token 70, but was followed by 15"
    for checks in (True, False):
        steps = Steps(checks_successors=checks)
        first_blocks(steps)
        if checks:
            with found("b", "3", what):
                steps.start("b", [*PROMPT[:4], 70], [2, 3], start=4)
        else:
            steps.start("b", [*PROMPT[:4], 70], [2, 3], start=4)


def test_nothing_follows_a_rejected_draft() -> None:
    steps = Steps()
    # In the last slot was a token before that 90 followed.
    steps.start("a", PROMPT[:4], [2])
    steps.free("a")
    steps.start("b", PROMPT[:2], [2], says=[13])
    steps.step("b", [13, 14], 2, [15], drafts=1)
    what = r"\(slot 11 of block 2\) was matched before token 90, but was followed by -1"
    with found("c", "3", what):
        steps.start("c", [*PROMPT[:4], 90], [2, 3], start=4)


def test_a_slot_written_anew_is_not_held_to_its_old_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    first_blocks(steps)
    steps.free("a")
    monkeypatch.setattr(canary_file, "_SLOTS_HASHED", 0)
    steps.start("b", [70, 71], [5], says=[72])
    steps.step("b", [72], 2, [73])
    assert steps.canary.num_wrong == 0


@pytest.mark.parametrize(("fed", "start"), [([90], 5), ([70], 6)])
def test_a_step_that_computes_other_tokens_than_come_next(fed: list[int], start: int) -> None:
    steps = Steps()
    first_blocks(steps)
    with found("a", "6", rf"computes \[{fed[0]}\] from {start} on, not \[90\]"):
        steps.step("a", fed, start, [91])


def test_a_log_tells_of_each_sequence_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(raises=False)
    steps.start("a", PROMPT, [2, 5], fed=[70, 71])
    first_blocks(steps)
    for position in (6, 7):
        steps.step("a", [90], position, [90], table=[2, 7])
    steps.start("b", PROMPT, [1, 3], start=4)
    assert [r.getMessage().partition("wrong: ")[2] for r in caplog.records] == [
        "'a' at position 0 computes [70, 71] from 0 on, not [11, 12, 13, 14]",
        "'a' at position 4 is read in block 7, but was given 5",
        "'b' at position 0 (slot 4 of block 1) was matched, but holds no KV of these tokens",
    ]
    assert steps.canary.num_wrong == 3
