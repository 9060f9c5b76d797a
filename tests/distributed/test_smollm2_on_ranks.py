"""The embedded model and its draft on three ranks: 9 query heads, 3 of keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.harness import ModelBench
from ranks import engines_of_threads, run_ranks
from test_smollm2 import QUESTIONS

from atom import LLM, SamplingParams
from atom.config import ModelOptions
from atom.distributed.parallel_state import ParallelGroup
from atom.model_loader.source import resolve_model

RANKS, NEW_TOKENS = 3, 48
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "quantization": "none",
    "max_model_len": 512,
    "max_num_seqs": 16,
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(ModelOptions(dtype="float32", quantization="none")).path


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    return [out.outputs[0].token_ids for out in llm.generate(prompts, sampling, use_tqdm=False)]


@pytest.mark.slow
def test_logits_and_tokens(folder: Path) -> None:
    """Where tokens differ, the two have the same logit but for rounding."""
    with LLM(no_speculation=True, **OPTIONS) as alone:
        prompts = [alone.render_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
        expected = generate(alone, prompts)
    with (
        engines_of_threads(),
        LLM(tensor_parallel_size=RANKS, num_threads=1, **OPTIONS) as llm,
    ):
        tokens = generate(llm, prompts)
        stats = llm.engine.core.stats.spec_decode
        assert stats is not None
        assert stats.acceptance_rate > 0.2

    whole = ModelBench(folder, block_size=16, max_model_len=512)
    text = [*prompts[0], *expected[0]]
    logits = whole.run(text, [len(text)], "text")
    scale = float(logits.abs().max())

    def on_rank(group: ParallelGroup) -> torch.Tensor:
        bench = ModelBench(folder, block_size=16, max_model_len=512, group=group)
        return bench.run(text, [len(text)])

    for got in run_ranks(RANKS, on_rank):
        torch.testing.assert_close(got, logits, rtol=0, atol=1e-4 * scale)

    for i, (mine, theirs) in enumerate(zip(tokens, expected, strict=True)):
        if mine == theirs:
            continue
        at = next(j for j, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1])
        text = [*prompts[i], *theirs[:at]]
        last = whole.run(text, [len(text)], f"prompt {i}")[-1]
        assert abs(last[mine[at]] - last[theirs[at]]) < 1e-4 * scale
