"""acceptance.py --bound: what it logs of every kind of draft, and what it computes of that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from spec_decode import engines
from spec_decode.engines import Folders

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.torch.draft_choice import choose_drafts
from atom.model_ops.kernels.torch.sampling import choose_tokens

Import = Callable[[str], Any]
KINDS = [*engines.EAGLE_DRAFTS, "mtp", *engines.BLOCK_DRAFTS]
ENGINE = {"dtype": "float32", "num_threads": 1, "kv_cache_memory": "4MB", "max_model_len": 128}


def test_the_bound_is_of_the_rows_that_were_reached(benchmark_module: Import) -> None:
    """The second draft counts only where the first was accepted."""
    bound = benchmark_module("_acceptance_bound")
    log = bound.RowLog()
    ids = torch.tensor([1, 3])
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 3)
    for first, sampled in ((3, [3, 1, 0]), (1, [2, 1, 0])):
        log.draft(torch.tensor([0.5, 0.25]), ids, first)
        log.draft(torch.tensor([0.1, 0.9]), ids, 1)
        log.verify(p, sampled)
    rates = log.summary()
    assert [place.rows for place in log.places] == [2, 1]
    assert rates["coupled"] == [0.5, 1.0]
    assert rates["likeliest"] == pytest.approx([0.2, 0.4])
    assert rates["bound"] == pytest.approx([0.2 + 0.25, 0.1 + 0.4])
    assert bound.tokens_per_forward([0.5, 0.5]) == 1.75


def speculation(kind: str, folders: Folders) -> dict[str, Any]:
    target = folders("deepseek_v3" if kind == "mtp" else "llama")
    return {**ENGINE, "model": str(target), **folders.speculation(kind)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_logged_is_what_the_engine_counts(
    kind: str, folders: Folders, benchmark_module: Import
) -> None:
    arms, bound = benchmark_module("_arms"), benchmark_module("_acceptance_bound")
    options = {**speculation(kind, folders), "enforce_eager": True}
    arm = arms.OfflineArm(kind, options)
    drafts = []
    with bound.rows_logged() as log:
        for i in range(3):
            sampling = arms.Sampling(0.7, seed=i, max_tokens=24, top_p=0.8)
            prompt = [{"role": "user", "content": f"question {i}"}]
            drafts.append(arm.answer([prompt], [sampling]).drafts)
    arm.close()
    counted = arms.total(drafts)
    assert log.places[0].rows == counted.num_drafts > 20
    assert len(log.places) <= 3
    accepted = [place.coupled for place in log.places]
    assert accepted == counted.accepted_per_position[: len(accepted)]
    assert sum(accepted) == counted.num_accepted_tokens
    for shares in log.summary().values():
        assert all(0 <= share <= 1 + 1e-6 for share in shares)


@pytest.mark.parametrize("kind", ["peagle", "dspark"])
def test_a_run(kind: str, folders: Folders, benchmark_module: Import, tmp_path: Path) -> None:
    flags = [
        text
        for name, value in speculation(kind, folders).items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "again and again"}\n')
    status = benchmark_module("acceptance").main(
        [
            *flags,
            *("--prompts", f"q={questions}", "--max-tokens", "16", "--require-same", "--bound"),
            *("--temperature", "0", "0.7", "--top-p", "0.8", "--output-dir", str(tmp_path)),
        ]
    )
    assert status == 0
    (bound,) = json.loads((tmp_path / "acceptance.json").read_text())["bounds"]
    assert (bound["prompts"], bound["temperature"], bound["top_p"]) == ("q", 0.7, 0.8)
    assert bound["arm"] == "k=3"
    assert 1 <= bound["coupled_tokens_per_forward"] <= 4
    report = (tmp_path / "acceptance.md").read_text()
    assert "- q, T=0.7, top-p 0.8, k=3: tokens per forward (by place) likeliest tokens" in report
    assert "| q | 0.7, top-p 0.8 | 1 | k=3 |" in report


def test_distributions_are_those_of_the_race(benchmark_module: Import) -> None:
    """Of the target, as often as it samples; of a draft, as it says."""
    generator = torch.Generator().manual_seed(0)
    count, size, scale = 20_000, 12, 0.8
    scores = (torch.randn(4, size, generator=generator) * 2).repeat_interleave(count, 0)
    options = SamplingMetadata(
        temperature=torch.tensor([0.7, 1.0, 1.3, 0.9]).repeat_interleave(count),
        top_k=torch.tensor([size, 5, size, 7], dtype=torch.int32).repeat_interleave(count),
        top_p=torch.tensor([1.0, 1.0, 0.7, 0.8]).repeat_interleave(count),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.1]).repeat_interleave(count),
        seeds=torch.arange(4 * count),
        positions=torch.zeros(4 * count, dtype=torch.int64),
    )
    distribution = benchmark_module("_acceptance_bound").distribution
    own = distribution(scores[::count], options.select(slice(None, None, count)))
    sampled = choose_tokens(scores, options).view(4, count)
    shares = torch.stack([row.bincount(minlength=size) for row in sampled]) / count
    assert torch.equal(shares > 0, own > 0)
    assert (own > 0).sum(-1).tolist() != [size] * 4
    torch.testing.assert_close(shares, own, atol=0.012, rtol=0)
    drafts, said = choose_drafts(scores, options, None, scale, 2, True)
    chances = distribution(scores, options, scale).gather(1, drafts[:, None])[:, 0]
    torch.testing.assert_close(said, chances)
