"""Speculation changes nothing but the number of steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from models import checkpoints
from spec_decode import engines
from spec_decode.engines import PROMPTS, SETTINGS, create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom.model_ops.kernels.native.build import native_build
from atom.stats import SpecDecodeStats

BLOCK = [*engines.BLOCK_DRAFTS]
METHODS = {
    "llama": ["mha", "mla", "suffix", "peagle", *BLOCK, "model"],
    "deepseek_v3": ["mha", "mla", "suffix", "mtp", "peagle", *BLOCK, "model"],
    "kimi_k25": ["kimi", "dspark"],
    "deepseek_v32": ["mtp", "suffix"],
    "glm_moe_dsa": ["mha"],
}
ONE_PASS = ("peagle", "kimi", *BLOCK)


class Targets:
    """Checkpoints and their continuations without speculation, each made once."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self._folders = engines.Folders(folder, tokenizer)
        self.target = self._folders
        self.expected = cache(self._expected)

    def _expected(self, kind: str) -> dict[str, list[list[int]]]:
        engine = create_engine(self.target(kind))
        return {name: generate(engine, params(name)) for name in SETTINGS}

    def speculation(self, method: str, k: int) -> dict[str, object]:
        """Engine arguments of a method."""
        options = self._folders.speculation(method, k)
        return {**options, "suffix_cache_tokens": 1000} if method == "suffix" else options


@pytest.fixture(scope="module")
def targets(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Targets:
    return Targets(tmp_path_factory.mktemp("lossless"), byte_level_tokenizer)


def stats_of(engine: object) -> SpecDecodeStats:
    stats = engine.engine.core.stats.spec_decode
    assert stats is not None
    return stats


def _grid() -> Iterator[object]:
    """Every method with every k; at each commit a part of the settings, so that each method and
    each k meets all of them once, and with `--run-slow` all."""
    methods = [(target, method) for target in METHODS for method in METHODS[target]]
    for number, (target, method) in enumerate(methods):
        turned = [*SETTINGS][number % len(SETTINGS) :] + [*SETTINGS][: number % len(SETTINGS)]
        # Drafts of one pass have the k of their turn at each commit.
        turn = (1, 3, 7)[number % 3]
        for k, part in {1: turned[:1], 3: turned[1:3], 7: turned[3:]}.items():
            marks = (pytest.mark.slow,) if method in ONE_PASS and k != turn else ()
            yield pytest.param(target, method, k, part, id=f"{target}-{method}-{k}", marks=marks)
            rest = [name for name in SETTINGS if name not in part]
            name = f"{target}-{method}-{k}-rest"
            yield pytest.param(target, method, k, rest, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(("target", "method", "k", "settings"), [*_grid()])
def test_tokens_equal_those_without_speculation(
    targets: Targets, target: str, method: str, k: int, settings: list[str]
) -> None:
    engine = create_engine(targets.target(target), **targets.speculation(method, k))
    # A second time for the recent outputs of the first.
    for name in settings * (2 if method == "suffix" else 1):
        assert generate(engine, params(name)) == targets.expected(target)[name], name
    assert stats_of(engine).num_drafts > 0


@pytest.mark.parametrize("k", [1, 3, 7, 15])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("wrong", [False, True], ids=["oracle", "never"])
def test_acceptance_extremes(
    targets: Targets, setting: str, k: int, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An oracle's drafts all count, a liar's none, and the tokens are the same."""
    expected = targets.expected("llama")[setting]
    known = {tuple(p): tokens for p, tokens in zip(PROMPTS, expected, strict=True)}
    with engines.drafters_from(monkeypatch, engines.oracle(known, k, wrong)):
        engine = create_engine(targets.target("llama"), **targets.speculation("suffix", k))
    assert generate(engine, params(setting)) == expected
    stats = stats_of(engine)
    if wrong:
        assert stats.tokens_per_forward == 1
        assert stats.accepted_counts == [stats.num_drafts] + [0] * k
    else:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
        # Full steps gain k + 1 tokens; only the last one is cut by max_tokens.
        assert stats.accepted_counts[k] == len(PROMPTS) * (23 // (k + 1))


def test_limits_and_stops_inside_accepted_drafts(
    targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """max_tokens is never overshot, and a stop token among accepted drafts ends there."""
    expected = targets.expected("llama")["warm"]
    known = {tuple(p): tokens for p, tokens in zip(PROMPTS, expected, strict=True)}
    with engines.drafters_from(monkeypatch, engines.oracle(known, 7, False)):
        engine = create_engine(targets.target("llama"), **targets.speculation("suffix", 7))
    for limit in (1, 2, 7, 8, 9):
        cut = generate(engine, params("warm", max_tokens=limit))
        assert cut == [tokens[:limit] for tokens in expected]
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        stop = tokens[5]
        until = tokens[: tokens.index(stop) + 1]
        assert generate(engine, params("warm", stop_token_ids=[stop]), [prompt]) == [until]


def test_logprobs_are_those_without_speculation(targets: Targets) -> None:
    plain = create_engine(targets.target("llama"))
    fast = create_engine(targets.target("llama"), **targets.speculation("suffix", 3))
    sampling = params("warm", logprobs=3, n=2)
    outputs = (e.generate(PROMPTS, sampling, use_tqdm=False) for e in (plain, fast))
    for a, b in zip(*outputs, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert x.token_ids == y.token_ids
            assert x.logprobs is not None
            assert y.logprobs is not None
            for p, q in zip(x.logprobs, y.logprobs, strict=True):
                assert list(p) == list(q)
                for token_id in p:
                    assert p[token_id].logprob == pytest.approx(q[token_id].logprob, abs=1e-4)
                    assert p[token_id].rank == q[token_id].rank


@pytest.mark.skipif(native_build().reason is not None, reason="needs the native kernels")
@pytest.mark.parametrize("setting", ["greedy", "warm"])
def test_bfloat16_tokens_are_the_same_however_they_are_computed(
    setting: str, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    """One sequence at a time, together, in chunks, and with speculation: other numbers of rows."""
    checkpoints.llama(
        tmp_path,
        vocab_size=len(byte_level_tokenizer),
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    byte_level_tokenizer.save_pretrained(tmp_path)
    ways: list[dict[str, Any]] = [
        {"max_num_seqs": 1},
        {},
        {"max_num_batched_tokens": 24},
        {"method": "suffix", "num_speculative_tokens": 15},
    ]
    alone, *others = [
        generate(create_engine(tmp_path, dtype="bfloat16", **way), params(setting)) for way in ways
    ]
    for way, tokens in zip(ways[1:], others, strict=True):
        assert tokens == alone, way
