"""Drafts behind prompts, whose rows only write the draft's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from spec_decode import engines
from spec_decode.engines import create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom.model_ops.attention.metadata import ModelInput
from atom.models.eagle3.base import Eagle3Draft
from atom.spec_decode.proposers import chain_proposer

PROMPTS = [[(7 * i * i + 11 * n) % 90 + 5 for i in range(36 + 10 * n)] for n in range(4)]


@pytest.mark.parametrize("target", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("setting", ["greedy", "warm"])
@pytest.mark.parametrize("chunk", [512, 40])
def test_they_are_those_of_a_pass_over_all_rows(
    target: str,
    setting: str,
    chunk: int,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = engines.write_target(target, tmp_path / "target", byte_level_tokenizer)
    draft = engines.write_draft("mha", tmp_path / "draft", len(byte_level_tokenizer))
    options: dict[str, Any] = {
        "method": "eagle3",
        "draft_model": str(draft),
        "num_speculative_tokens": 3,
        "max_num_batched_tokens": chunk,
    }
    written: list[int] = []
    write_kv = Eagle3Draft.write_kv

    def watch(self: Eagle3Draft, rows: ModelInput, hidden: torch.Tensor) -> None:
        written.append(len(rows.input_ids))
        write_kv(self, rows, hidden)

    monkeypatch.setattr(Eagle3Draft, "write_kv", watch)

    def drafts(rows: int) -> tuple[list[list[int]], dict[tuple[int, ...], list[int]]]:
        monkeypatch.setattr(chain_proposer, "_ROWS_OF_PROMPTS", rows)
        with (
            engines.drafts_recorded(monkeypatch) as recorded,
            create_engine(folder, **options) as engine,
        ):
            texts = generate(engine, params(setting, max_tokens=10), PROMPTS)
        return texts, recorded[0]

    texts, everything = drafts(10**6)
    written.clear()
    assert drafts(16) == (texts, everything)
    assert max(written) > 30
    assert sum(map(bool, everything.values())) > 20
