"""Steps that are launched before the results of the last one are read give the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from spec_decode import engines
from spec_decode.engines import PROMPTS, create_engine, params
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.batch import LaunchedStep, ScheduledBatch, StepOutput
from atom.config import ConfigError
from atom.entrypoints.llm import GenerationError
from atom.kv_cache.base import KVCachePlan
from atom.model_engine import worker
from atom.structured_output.params import StructuredOutput

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
    "dflash": {"method": "dflash", "num_speculative_tokens": 4},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
}
PROMPTS = PROMPTS[:6] + PROMPTS[10:12]


class Checkpoints:
    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        @cache
        def target(kind: str) -> Path:
            return engines.write_target(kind, folder / kind, tokenizer)

        @cache
        def draft(kind: str) -> Path:
            return engines.write_draft(kind, folder / kind, len(tokenizer))

        self.engine = lambda method, **options: create_engine(
            target("deepseek_v3" if method == "mtp" else "llama"),
            **METHODS[method],
            **(
                {"draft_model": str(draft("mha" if method == "eagle3" else method))}
                if method in ("eagle3", "dflash")
                else {}
            ),
            **options,
        )
        self.plain: Callable[[str], LLM] = cache(self.engine)
        self.ahead: Callable[[str], LLM] = cache(
            lambda method: self.engine(method, overlap=True, max_num_batched_tokens=48)
        )


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("overlap"), byte_level_tokenizer)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", ["greedy", "top-p", "penalties"])
def test_tokens_are_as_without(checkpoints: Checkpoints, method: str, setting: str) -> None:
    expected = engines.generate(checkpoints.plain(method), params(setting), PROMPTS)
    assert engines.generate(checkpoints.ahead(method), params(setting), PROMPTS) == expected
