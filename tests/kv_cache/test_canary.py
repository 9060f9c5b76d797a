"""`--debug-kv-canary` is silent where nothing is wrong; what it and the integrity check see.

docs/reliability.md has the table that `FAULTS` proves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import checkpoints
from spec_decode import engines
from spec_decode.engines import PROMPTS, create_engine, drafters_from, generate, oracle, params
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.config import ConfigError
from atom.kv_cache import canary as canary_file
from atom.kv_cache.block_tables import BlockTables
from atom.kv_cache.canary import KVCanary
from atom.messages import EngineDeadError
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.scheduler import Scheduler
from atom.model_engine.scheduling.prefix_cache import PrefixCache
from atom.model_engine.sequence import Sequence
from atom.model_engine.step.input_builder import InputBuilder

# Two requests that share blocks while they run, and one for each of their beginnings.
SHARED = checkpoints.prompt(17, seed=90)


class Engines:
    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self._target = engines.write_target("llama", folder / "target", tokenizer)
        self._draft = engines.write_draft("mha", folder / "draft", len(tokenizer))

    def __call__(self, method: str = "none", canary: str | None = "raise", **fields: Any) -> LLM:
        if method != "none":
            fields = {"method": method, "num_speculative_tokens": 3, **fields}
        if method == "eagle3":
            fields["draft_model"] = str(self._draft)
        return create_engine(self._target, debug_kv_canary=canary, **fields)


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Engines:
    return Engines(tmp_path_factory.mktemp("canary"), byte_level_tokenizer)


@pytest.fixture
def watch_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the few blocks of these tests nothing is left to chance."""
    for name, most in (("_SLOTS_HASHED", 64), ("_BLOCKS_CHECKED", 32)):
        monkeypatch.setattr(canary_file, name, most)


def canary_of(llm: LLM) -> KVCanary:
    found = llm.engine.core.executor.launcher._canary  # type: ignore[attr-defined]
    assert isinstance(found, KVCanary)
    return found


def run(llm: LLM, *prompts: list[int], check: bool = False, max_tokens: int = 12) -> None:
    """Generate step by step; with `check` the integrity is checked after each."""
    core = llm.engine.core
    sampling = params("greedy", max_tokens=max_tokens)
    if check:
        update = core._scheduler.update

        def checked(*args: Any) -> Any:
            outputs = update(*args)
            core._scheduler.check_integrity()
            return outputs

        core._scheduler.update = checked  # type: ignore[method-assign]
    llm.generate(list(prompts), sampling, use_tqdm=False)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", ["none", "eagle3", "suffix"])
def test_it_is_silent_and_changes_nothing(engine: Engines, method: str, overlap: bool) -> None:
    more = {"overlap": True} if overlap else {"kv_cache_memory": "300KB"}
    plain, watched = engine(method, None, **more), engine(method, **more)
    for setting in ("greedy", "warm"):
        expected = generate(plain, params(setting))
        assert generate(watched, params(setting)) == expected
        # Again with the beginnings cached.
        longer = [[*p, *o[:9]] for p, o in zip(PROMPTS, expected, strict=True)]
        assert generate(watched, params(setting), longer) == generate(
            plain, params(setting), longer
        )
    stats = watched.engine.core.stats
    assert stats.prefix_cache_hits if overlap else stats.num_preemptions
    assert canary_of(watched).num_wrong == 0
    assert len(canary_of(watched)._hashes) > 100


def test_off_it_is_not_there(engine: Engines) -> None:
    worker: Any = engine(canary=None).engine.core.executor
    assert type(worker.launcher) is ModelRunner
    assert worker.launcher is worker._runner
    assert type(worker.inputs) is InputBuilder


def test_answers_that_mean_nothing_are_refused(engine: Engines) -> None:
    with pytest.raises(ConfigError, match="debug_kv_canary"):
        engine("eagle3", speculative_synthetic_acceptance_length=2.0)


Plant = Callable[[pytest.MonkeyPatch], None]


def stale_table(patch: pytest.MonkeyPatch) -> None:
    """Every third growth does not reach the device."""
    update, count = BlockTables.update, iter(range(1000))
    patch.setattr(BlockTables, "update", lambda self: next(count) % 3 == 2 or update(self))


def slot_written_twice(patch: pytest.MonkeyPatch) -> None:
    """The last of the decoded sequences writes where another one has."""
    slots_at = BlockTables.slots_at

    def planted(self: BlockTables, rows: np.ndarray, positions: np.ndarray, size: int) -> Any:
        slots = slots_at(self, rows, positions, size)
        if len(set(rows)) > 1 and len(rows) == len(set(rows)):
            slots[-1] = slots_at(self, rows[:1], np.array([1]), size)[0]
        return slots

    patch.setattr(BlockTables, "slots_at", planted)


def freed_block_reused(patch: pytest.MonkeyPatch) -> None:
    """A sequence goes on with a block that the pool has back."""
    update, free = Scheduler.update, BlockPool.free
    freed: list[str] = []

    def planted(self: Scheduler, *args: Any) -> Any:
        outputs = update(self, *args)
        for seq in self._live.values():
            if seq.block_ids and not freed:
                freed.append(seq.request.id)
                self._pool.free(seq.block_ids[-1:])
        return outputs

    def free_once(self: BlockPool, block_ids: list[int]) -> None:
        free(self, [id for id in block_ids if self.ref_count(id)])

    patch.setattr(Scheduler, "update", planted)
    patch.setattr(BlockPool, "free", free_once)


def wrong_successor(patch: pytest.MonkeyPatch) -> None:
    """A block's hash leaves out the token after it, on which the draft's KV depends."""
    block_hashes = Sequence.block_hashes
    patch.setattr(
        Sequence, "block_hashes", lambda self, count, size, _: block_hashes(self, count, size, 0)
    )


def rejected_draft_published(patch: pytest.MonkeyPatch) -> None:
    """The newest token counts as computed, in whose slot is a draft that was rejected."""
    publish = PrefixCache.publish

    def planted(self: PrefixCache, seq: Sequence) -> None:
        if seq.num_computed < seq.num_prompt_tokens:
            return publish(self, seq)
        seq.num_computed += 1
        publish(self, seq)
        seq.num_computed -= 1
        return None

    patch.setattr(PrefixCache, "publish", planted)


def rounds_of(plant: Plant) -> list[list[list[int]]]:
    """Prompts, one round after another."""
    ended = [SHARED[:8]]
    if plant is rejected_draft_published:
        return [ended]
    if plant is wrong_successor:
        return [[SHARED], [[*SHARED[:12], 5, 6, 7]]]
    return [[SHARED, checkpoints.prompt(9, seed=91), checkpoints.prompt(11, seed=92)]]


# With what the canary and the integrity check say.
FAULTS: list[tuple[Plant, str, str, str | None]] = [
    (stale_table, "none", "is read in block", None),
    (slot_written_twice, "none", "other bytes than were written", None),
    (freed_block_reused, "none", "the KV of other tokens", "references counted"),
    (wrong_successor, "eagle3", "was followed by", "a hash that its tokens do not have"),
    (rejected_draft_published, "oracle", "holds no KV of these tokens", "has published"),
]
IDS = [plant.__name__ for plant, *_ in FAULTS]


def build(
    engine: Engines, monkeypatch: pytest.MonkeyPatch, method: str, canary: str | None
) -> tuple[LLM, list[int]]:
    """An engine, and what it says after the first eight shared tokens, with an oracle that is
    always wrong.
    """
    if method != "oracle":
        return engine(method, canary), []
    prompt = SHARED[:8]
    known = generate(engine(canary=None), params("greedy"), [prompt])[0]
    knows = {tuple(prompt): known, (*prompt, *known[:4], 3): known}
    with drafters_from(monkeypatch, oracle(knows, 3, wrong=True)):
        return engine("suffix", canary), known


@pytest.mark.usefixtures("watch_all")
@pytest.mark.parametrize(("plant", "method", "message", "_"), FAULTS, ids=IDS)
def test_the_canary_sees(
    engine: Engines,
    monkeypatch: pytest.MonkeyPatch,
    plant: Plant,
    method: str,
    message: str,
    _: str | None,
) -> None:
    llm, known = build(engine, monkeypatch, method, "raise")
    plant(monkeypatch)

    def all_rounds() -> None:
        # The fifth token would be the last of the third block, and ends the first request.
        for prompts in rounds_of(plant):
            run(llm, *prompts, max_tokens=4 if known else 12)
        if known:
            run(llm, [*SHARED[:8], *known[:4], 3], max_tokens=1)

    with pytest.raises(EngineDeadError, match=message):
        all_rounds()
    assert canary_of(llm).num_wrong


@pytest.mark.parametrize(("plant", "method", "_", "message"), FAULTS, ids=IDS)
def test_what_the_integrity_check_sees(
    engine: Engines,
    monkeypatch: pytest.MonkeyPatch,
    plant: Plant,
    method: str,
    _: str,
    message: str | None,
) -> None:
    llm, _known = build(engine, monkeypatch, method, None)
    plant(monkeypatch)

    def all_rounds() -> None:
        for prompts in rounds_of(plant):
            run(llm, *prompts, check=True)

    if message is None:
        all_rounds()
        return
    with pytest.raises(EngineDeadError, match=message):
        all_rounds()


def test_log_tells_once_for_each_sequence_and_goes_on(
    engine: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = engine(canary="log")
    stale_table(monkeypatch)
    outputs = llm.generate(PROMPTS[:6], params("greedy"), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [24] * 6
    told = [r.getMessage() for r in caplog.records if "the KV cache is wrong" in r.getMessage()]
    assert 1 <= len(told) <= 6
    assert canary_of(llm).num_wrong == len(told)
