"""SmolLM2's answers to real questions are the same tokens however they are computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atom import LLM, SamplingParams
from atom.model_ops.kernels.native.build import native_build
from atom.stats import SpecDecodeStats, total

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(native_build().reason is not None, reason=str(native_build().reason)),
]
NUM_QUESTIONS = 200


@pytest.fixture(scope="module")
def questions(request: pytest.FixtureRequest) -> list[str]:
    path = request.config.getoption("--gsm8k")
    if path is None:
        pytest.skip("wants GSM8K's test.jsonl: --gsm8k FILE")
    lines = Path(path).read_text().splitlines()[:NUM_QUESTIONS]
    return [json.loads(line)["question"] for line in lines]


@contextmanager
def engine(**options: Any) -> Iterator[LLM]:
    options = {"max_model_len": 1024, "kv_cache_memory": "512MiB", "num_threads": 2, **options}
    with LLM(**options) as llm:
        yield llm


def answers(
    llm: LLM, questions: list[str], temperature: float, at_once: int
) -> tuple[list[list[int]], SpecDecodeStats]:
    """The tokens of each answer, and the drafts that were verified for them."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=temperature, top_p=1.0, max_tokens=48, seed=7)
    outputs = []
    for start in range(0, len(chats), at_once):
        outputs += llm.chat(chats[start : start + at_once], params, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    return tokens, total(output.spec_decode or SpecDecodeStats() for output in outputs)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "weights",
    [{"dtype": "bfloat16", "quantization": "none"}, {"quantization": "int8"}, {}],
    ids=["bf16", "int8", "as stored"],
)
def test_tokens_depend_on_nothing_but_the_question(
    weights: dict[str, Any], temperature: float, questions: list[str]
) -> None:
    """Alone or in a batch, in chunks, recorded or not, with drafts and lookup or without."""
    with engine(no_speculation=True, max_num_seqs=8, **weights) as llm:
        expected, _ = answers(llm, questions, temperature, 8)
        assert answers(llm, questions[:20], temperature, 1)[0] == expected[:20]
    ways: list[dict[str, Any]] = [
        {"max_num_seqs": 8},  # the shipped draft, with a lookup
        {"no_speculation": True, "max_num_seqs": 32, "max_num_batched_tokens": 64},
        {"no_speculation": True, "max_num_seqs": 8, "enforce_eager": True},
    ]
    for way in ways:
        with engine(**way, **weights) as llm:
            tokens, drafts = answers(llm, questions, temperature, 32)
        assert tokens == expected, way
        if "no_speculation" in way:
            assert drafts.num_drafts == 0
        else:  # there was something to change tokens: drafts, right ones and wrong ones
            assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
            assert {"eagle3", "lookup"} <= drafts.by_source.keys()
