"""A draft depends on the text before it, not on the way in which that text was computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import prompt
from spec_decode import engines
from spec_decode.engines import create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.kv_cache.base import KVCachePlan
from atom.model_engine.start_up import kv_memory

MAX_TOKENS = 16
SHARED = prompt(21, seed=5)
# Prefixes that end inside a block, on its edge, and with another token after the same block.
PROMPTS = [[*SHARED[:n], *prompt(9, seed=n)] for n in (8, 16, 16, 17, 20)] + [SHARED, SHARED[:12]]
PROMPTS[2] = [*SHARED[:16], 40, *prompt(8, seed=99)]
SAMPLING = params("warm", max_tokens=MAX_TOKENS)

WAYS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 16},
    "tiny chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 2},
    "prefix hits": {"enable_prefix_caching": True},
    "prefix hits in chunks": {"enable_prefix_caching": True, "max_num_batched_tokens": 16},
    "preempted": {},
}


class Bench:
    """A target with a draft, and what it says and drafts when prompts are computed whole."""

    def __init__(self, kind: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        target, _, draft = kind.partition(" ")
        self.folder = engines.write_target(target, folder / "target", tokenizer)
        self.options: dict[str, Any] = {"method": draft, "num_speculative_tokens": 4}
        if draft != "mtp":
            written = engines.write_draft(draft, folder / "draft", len(tokenizer))
            self.options |= {"method": engines.method_of(draft), "draft_model": str(written)}
        with pytest.MonkeyPatch.context() as patch, engines.drafts_recorded(patch) as recorders:
            whole = self.engine(enable_prefix_caching=False)
        self.expected = generate(whole, SAMPLING, PROMPTS)
        (self.drafts,) = recorders

    def engine(self, **changes: Any) -> LLM:
        return create_engine(self.folder, **self.options, **changes)


@pytest.fixture(
    scope="module",
    params=[
        "llama mha",
        "deepseek_v3 mla",
        "deepseek_v3 mtp",
        "llama peagle",
        "llama dspark",
        "llama dflash",
        "kimi_k25 kimi",
    ],
)
def bench(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> Bench:
    return Bench(request.param, tmp_path_factory.mktemp("invariance"), byte_level_tokenizer)


@contextmanager
def prepared(way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The options of an engine that is built and run inside, which has to go that way; `whole` if
    it is none of `WAYS`.
    """
    changes = {"enable_prefix_caching": False, **WAYS.get(way, {})}
    with monkeypatch.context() as patch:
        if way == "preempted":
            # Room for two sequences at a time.
            patch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(20, 0))
            changes |= {"max_model_len": 64}
        yield changes


def check_tokens(
    way: str, engine: LLM, sampling: SamplingParams, expected: list[list[int]]
) -> None:
    """That it generates these tokens, and goes that way."""
    for _ in range(2 if way.startswith("prefix") else 1):  # then every prefix is cached
        assert generate(engine, sampling, PROMPTS) == expected
    stats = engine.engine.core.stats
    assert (stats.num_preemptions > 0) == (way == "preempted")
    assert (stats.prefix_cache_hits > 0) == way.startswith("prefix")


def num_verifiable(history: tuple[int, ...]) -> int:
    """Drafts that max_tokens keeps from ever being verified may be made without a KV slot."""
    num_prompt = max(len(p) for p in PROMPTS if history[: len(p)] == tuple(p))
    return max(num_prompt + MAX_TOKENS - len(history) - 1, 0)


@pytest.mark.parametrize("way", WAYS)
def test_drafts_are_the_same(bench: Bench, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with prepared(way, monkeypatch) as changes:
        with engines.drafts_recorded(monkeypatch) as recorders:
            other = bench.engine(**changes)
        check_tokens(way, other, SAMPLING, bench.expected)
    (drafts,) = recorders
    compared = bench.drafts.keys() & drafts.keys()
    assert len(compared) > 50
    for history in compared:
        room = num_verifiable(history)
        assert bench.drafts[history][:room] == drafts[history][:room]
