"""Acceptance at random: as long as asked for, the same for the same seeds, and said aloud."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spec_decode import engines
from spec_decode.engines import PROMPTS, create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams, StructuredOutput
from atom.config import ConfigError, SpeculativeOptions
from atom.messages import EngineLimits, RequestRefusedError
from atom.sampling.synthetic import SyntheticAcceptance, _mixed
from atom.stats import SpecDecodeStats

K = 3


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("synthetic")
    target = engines.write_target("llama", folder / "target", byte_level_tokenizer)
    return target, engines.write_draft("mha", folder / "draft", len(byte_level_tokenizer))


def synthetic(folders: tuple[Path, Path], length: float, **options: Any) -> LLM:
    target, draft = folders
    return create_engine(
        target,
        method="eagle3",
        draft_model=str(draft),
        num_speculative_tokens=K,
        speculative_synthetic_acceptance_length=length,
        **options,
    )


def run(engine: LLM, **overrides: Any) -> tuple[list[list[int]], SpecDecodeStats]:
    """The tokens, and what was verified for them."""
    before = engine.engine.core.stats.spec_decode
    assert before is not None
    tokens = generate(engine, params("warm", max_tokens=88, **overrides))
    now = engine.engine.core.stats.spec_decode
    assert now is not None
    return tokens, now.since(before)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "eager"])
def test_steps_bring_so_many_tokens(folders: tuple[Path, Path], recorded: bool) -> None:
    """All but the last step of a text, which is cut."""
    engine = synthetic(folders, 2.6, enforce_eager=not recorded)
    tokens, stats = run(engine)
    assert {len(t) for t in tokens} == {88}
    one, two = stats.accepted_counts[1:3]
    assert one + two > 0.95 * stats.num_drafts
    assert two / (one + two) == pytest.approx(0.6, abs=0.08)
    # From which the same seed decides the same.
    assert run(engine) == (tokens, stats)
    assert run(engine, seed=7)[1] != stats


def test_overlapped_steps_accept_as_many(folders: tuple[Path, Path]) -> None:
    """Where a sequence is decides, and only the device knows it when the step is launched."""
    tokens, stats = run(synthetic(folders, 2.6, enforce_eager=True))
    ahead = synthetic(folders, 2.6, overlap=True)
    others, counted = run(ahead)
    # At the end there may be fewer drafts, since more tokens may be on their way.
    assert [own[: -2 * (K + 1)] for own in others] == [own[: -2 * (K + 1)] for own in tokens]
    assert counted.num_drafts == pytest.approx(stats.num_drafts, rel=0.05)
    one, two = counted.accepted_counts[1:3]
    assert one + two > 0.9 * counted.num_drafts
    assert two / (one + two) == pytest.approx(0.6, abs=0.08)
    assert run(ahead) == (others, counted)


@pytest.mark.parametrize(("length", "accepted"), [(1, 0), (K + 1, K)])
def test_extremes(folders: tuple[Path, Path], length: float, accepted: int) -> None:
    stats = run(synthetic(folders, length))[1]
    assert stats.accepted_counts[accepted] > 0.95 * stats.num_drafts


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"overlap": True}])
def test_every_token_has_its_logprobs(folders: tuple[Path, Path], options: dict[str, Any]) -> None:
    """Also of several answers, each of which accepts by a seed of its own."""
    engine = synthetic(folders, 2.6, **options)
    sampling = params("warm", n=3, logprobs=2, max_tokens=30)
    counts = set()
    for output in engine.generate(PROMPTS[:4], sampling, use_tqdm=False):
        for each in output.outputs:
            assert each.logprobs is not None
            assert len(each.logprobs) == len(each.token_ids) == 30
            for token_id, known in zip(each.token_ids, each.logprobs, strict=True):
                assert token_id in known
                assert len(known) in (2, 3)
            counts.add(tuple(step.num_tokens for step in each.steps))
    assert len(counts) > 4
    engine.engine.core.block_pool.check_integrity()
    assert engine.engine.core.block_pool.num_used == 0


def test_counts_follow_seed_and_position() -> None:
    acceptance = SyntheticAcceptance(2.25)
    positions, most = np.arange(40000), np.full(40000, K)
    seeds = np.full(40000, -5)
    counts = acceptance.counts(seeds, positions, most)
    assert counts.mean() == pytest.approx(1.25, abs=0.01)
    np.testing.assert_array_equal(acceptance.counts(seeds[:9], positions[:9], most[:9]), counts[:9])
    others = acceptance.counts(seeds + 1, positions, most)
    assert np.corrcoef(counts, others)[0, 1] == pytest.approx(0, abs=0.02)
    assert np.corrcoef(counts[1:], counts[:-1])[0, 1] == pytest.approx(0, abs=0.02)
    few = np.arange(40000) % (K + 1)
    np.testing.assert_array_equal(acceptance.counts(seeds, positions, few), np.minimum(counts, few))


def test_the_mixture_is_splitmix64() -> None:
    """The first two numbers of its generator from 0."""
    words = np.array([0, 0x9E3779B97F4A7C15], dtype=np.uint64)
    assert _mixed(words).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_grammars_are_refused_and_the_log_and_answers_say_why(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="atom"):
        engine = synthetic(folders, 2.5)
    assert "answers mean nothing" in caplog.text
    assert engine.engine.core.limits.fingerprint == "synthetic-acceptance-length-2.5"
    wanted = SamplingParams(structured_output=StructuredOutput.choice(["a", "b"]))
    with pytest.raises(RequestRefusedError, match="against any grammar"):
        engine.generate([PROMPTS[0]], wanted, use_tqdm=False)


@pytest.mark.parametrize("length", [0.99, 4.01, float("nan"), -2])
def test_other_lengths_are_refused(length: float) -> None:
    with pytest.raises(ConfigError, match=r"must be 1 to num_speculative_tokens \+ 1 = 4"):
        SpeculativeOptions(
            method="suffix", num_speculative_tokens=K, synthetic_acceptance_length=length
        )


def test_honest_engines_have_no_fingerprint() -> None:
    limits = EngineLimits(max_model_len=8, num_blocks=1, block_size=8, vocab_size=9, max_logprobs=0)
    assert limits.fingerprint is None
