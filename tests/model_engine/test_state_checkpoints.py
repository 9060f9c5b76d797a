"""Prefix caching of models with recurrent states: tokens are those of computing every prompt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import prompt
from models.hybrids import add_prediction_layer, write_hybrid
from spec_decode import engines
from spec_decode.engines import create_engine, generate
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.config import ConfigError
from atom.kv_cache.base import KVCachePlan
from atom.kv_cache.state_pool import StatePool
from atom.model_engine.scheduling import checkpoints
from atom.model_engine.scheduling.checkpoints import Checkpoints, StatefulPrefixCache
from atom.model_engine.start_up import kv_memory

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SHARED = prompt(30)
# Two that part behind what they share, a third, the first again, one that goes on from it, and the
# second again, whose last token begins a block.
PROMPTS = [
    [*SHARED, *prompt(9, seed=1)],
    [*SHARED, *prompt(7, seed=2)],
    [*SHARED, *prompt(13, seed=3)],
    [*SHARED, *prompt(9, seed=1)],
    [*SHARED, *prompt(9, seed=1), *prompt(20, seed=4)],
    [*SHARED, *prompt(7, seed=2)],
]
# Whole blocks of four tokens: what the third shares was kept by the second.
CACHED = [0, 0, 28, 36, 36, 36]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "LEAST_TOKENS", 4)


@pytest.fixture(scope="module")
def target(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    folder = tmp_path_factory.mktemp("target")
    add_prediction_layer(write_hybrid("qwen3_next", folder, vocab_size=len(byte_level_tokenizer)))
    byte_level_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    engine = create_engine(target, enable_prefix_caching=False)
    return [tokens for text in PROMPTS for tokens in generate(engine, GREEDY, [text])]


def run(engine: LLM) -> tuple[list[list[int]], list[int | None]]:
    """The tokens of each prompt after the other, and how many of it were cached."""
    outputs = [engine.generate([text], GREEDY, use_tqdm=False)[0] for text in PROMPTS]
    engine.engine.core.block_pool.check_integrity()
    return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs]


def store(engine: LLM) -> Checkpoints:
    prefixes = engine.engine.core._scheduler._prefixes
    assert isinstance(prefixes, StatefulPrefixCache)
    return prefixes._checkpoints


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"method": "mtp", "num_speculative_tokens": 3, "speculative_adaptive": False},
        {"method": "suffix", "num_speculative_tokens": 3, "speculative_adaptive": False},
    ],
    ids=["plain", "chunks", "mtp", "suffix"],
)
def test_tokens_after_prefix_hits(
    target: Path, expected: list[list[int]], options: dict[str, Any], overlap: bool
) -> None:
    engine = create_engine(target, overlap=overlap, **options)
    tokens, cached = run(engine)
    assert tokens == expected
    assert cached == CACHED
    assert store(engine).num_reserved == 0


def test_few_slots_are_used_again(target: Path, expected: list[list[int]]) -> None:
    engine = create_engine(target, state_slots=1)
    tokens, cached = run(engine)
    assert tokens == expected
    assert cached != CACHED
    # All at once: most find no slot.
    assert generate(engine, GREEDY, PROMPTS) == expected
    assert store(engine).num_reserved == 0


def test_together_and_preempted(
    target: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(24, 0))
        engine = create_engine(target, max_num_batched_tokens=16, max_model_len=80)
    for _ in range(3):
        assert generate(engine, GREEDY, PROMPTS) == expected
    assert engine.engine.core.stats.num_preemptions > 0
    assert store(engine).num_reserved == 0


def test_a_stale_state_is_noticed(
    target: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a slot still had what an earlier sequence left there."""
    start = StatePool.start

    def forgets(self: StatePool, batch: Any) -> None:
        self._to_keep = []
        start(self, batch)

    monkeypatch.setattr(StatePool, "start", forgets)
    tokens, cached = run(create_engine(target))
    assert cached == CACHED
    assert tokens != expected


def test_slots_against_a_model_of_them() -> None:
    draw, slots = random.Random(1), 7
    store, reserved = Checkpoints(slots), set[int]()
    published: dict[bytes, int] = {}
    for step in range(5000):
        kind = draw.random()
        if kind < 0.4:
            slot = store.reserve()
            assert (slot is None) == (len(reserved) == slots)
            if slot is not None:
                assert slot not in reserved
                published = {key: s for key, s in published.items() if s != slot}
                reserved.add(slot)
        elif reserved and kind < 0.7:
            slot = draw.choice(sorted(reserved))
            key = bytes([draw.randrange(20)])
            store.publish(key, slot)
            published.setdefault(key, slot)
            reserved.remove(slot)
        elif reserved and kind < 0.8:
            store.release(slot := draw.choice(sorted(reserved)))
            reserved.remove(slot)
        elif published:
            key = draw.choice(sorted(published))
            assert key in store
            assert store.find(key) == published[key]
        assert store.num_reserved == len(reserved), step


@pytest.mark.parametrize(
    ("options", "message"),
    [({"state_slots": 3, "enable_chunked_prefill": False}, "needs --enable-chunked-prefill")],
)
def test_slots_that_could_not_be_filled(
    target: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        create_engine(target, **options)


def test_options_of_states_without_any(
    tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = engines.write_target("llama", tmp_path, byte_level_tokenizer)
    for given in ({"state_slots": 3}, {"mamba_ssm_cache_dtype": "bfloat16"}):
        with pytest.raises(ConfigError, match="has no recurrent states"):
            create_engine(folder, **given)


def test_prefix_caching_may_be_off(target: Path, expected: list[list[int]]) -> None:
    for options in ({"state_slots": 0}, {"enable_prefix_caching": False}):
        tokens, cached = run(create_engine(target, **options))
        assert tokens == expected
        assert not any(cached)
