"""What one request cannot do ends that request: others give the tokens that they give alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from spec_decode import engines
from spec_decode.engines import PROMPTS, create_engine, params
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.entrypoints.llm import GenerationError
from atom.kv_cache.base import KVCachePlan
from atom.messages import RequestRefusedError
from atom.model_engine.start_up import kv_memory

GOOD = PROMPTS[:6]
SPECULATION: dict[str, dict[str, Any]] = {
    "none": {},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
}


class Checkpoints:
    """A target where every logit behind the token `poison` is NaN; its draft never proposes it."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self.draft = engines.write_draft("mha", folder / "draft", len(tokenizer))
        known = load_file(self.draft / "model.safetensors")["t2d"]
        self.poison = int((~known[256:]).nonzero()[0]) + 256
        self.target = cache(self._target)
        self.expected = cache(self._expected)

    def _target(self, method: str) -> Path:
        kind = "deepseek_v3" if method == "mtp" else "llama"
        if method not in ("none", "mtp"):
            return self.target("none")
        folder = engines.write_target(kind, self._folder / kind, self._tokenizer)
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            for name, tensor in tensors.items():
                if name.endswith("head.weight"):
                    tensor[self.poison] = 0  # nobody else comes across it
            save_file(tensors, file, metadata={"format": "pt"})
        return folder

    def _expected(self, method: str, setting: str) -> list[list[int]]:
        if method not in ("none", "mtp"):
            return self.expected("none", setting)
        return engines.generate(create_engine(self.target(method)), params(setting), GOOD)

    def engine(self, method: str, **overrides: Any) -> LLM:
        speculation = dict(SPECULATION[method])
        if method == "eagle3":
            speculation["draft_model"] = str(self.draft)
        llm = create_engine(self.target(method), **speculation, **overrides)
        model = llm.engine.core.executor.parts.model  # type: ignore[attr-defined]
        # In memory: a checkpoint with such a number is refused.
        with torch.inference_mode():
            model.token_embedding.weight[self.poison] = torch.nan
        return llm


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("failures"), byte_level_tokenizer)


def check_bad_beside_good(
    llm: LLM, expected: list[list[int]], setting: str, bad: list[int], wanted: SamplingParams
) -> RequestRefusedError:
    """Run a bad request amid good ones, twice, and return what it ends with."""
    for _ in range(2):
        with pytest.raises(GenerationError, match="1 of 7 prompts failed; prompt 2") as caught:
            llm.generate(
                [*GOOD[:2], bad, *GOOD[2:]],
                [params(setting)] * 2 + [wanted] + [params(setting)] * 4,
                use_tqdm=False,
            )
        results = [r.outputs[0].token_ids for r in caught.value.results if r is not None]
        assert results == expected
        assert llm.engine.core.block_pool.num_used == 0
    error = caught.value.errors[2]
    assert isinstance(error, RequestRefusedError)
    assert engines.generate(llm, params(setting), GOOD) == expected
    return error


@pytest.mark.parametrize("setting", ["greedy", "top-p", "penalties"])
@pytest.mark.parametrize("method", SPECULATION)
def test_logits_that_are_not_numbers(checkpoints: Checkpoints, method: str, setting: str) -> None:
    """The prompt is the longest of all, and its blocks are used again."""
    bad = [5, checkpoints.poison, *PROMPTS[9]]
    error = check_bad_beside_good(
        checkpoints.engine(method),
        checkpoints.expected(method, setting),
        setting,
        bad,
        params(setting, logprobs=2),
    )
    assert "no token can be chosen after 0 tokens" in str(error)


@pytest.mark.parametrize("method", SPECULATION)
def test_every_token_is_an_end_that_may_not_come(checkpoints: Checkpoints, method: str) -> None:
    llm = checkpoints.engine(method)
    every = list(range(llm.engine.core.limits.vocab_size))
    wanted = SamplingParams(min_tokens=3, stop_token_ids=every, temperature=0.0, logprobs=1)
    expected = checkpoints.expected(method, "greedy")
    error = check_bad_beside_good(llm, expected, "greedy", GOOD[0], wanted)
    assert "no token can be chosen after 0 tokens: min_tokens, stop_token_ids" in str(error)


def test_a_failure_after_some_tokens(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool that is too small for all, so that sequences are preempted."""
    monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(24, 0))
    llm = checkpoints.engine("suffix", max_model_len=96)
    # The token after the prompt is the poisoned one; the next step's logits are not numbers.
    wanted = params("greedy", logit_bias={checkpoints.poison: 100.0})
    expected = checkpoints.expected("none", "greedy")
    error = check_bad_beside_good(llm, expected, "greedy", GOOD[0], wanted)
    assert "no token can be chosen after 1 tokens" in str(error)
    assert llm.engine.core.stats.num_preemptions > 0


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 1e-6},
        {"repetition_penalty": 1e6},
        {"top_p": 1e-46},
        {"top_p": 1e-300, "top_k": 5},
        {"min_p": 1e-46},
        {"min_p": 1.0},
        {"temperature": 1e-5},
        {"temperature": 1e4, "min_p": 1.0},
        {"temperature": 5e-324},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0, "logit_bias": {5: 100.0}},
    ],
)
def test_extreme_parameters_give_tokens(checkpoints: Checkpoints, extreme: dict[str, Any]) -> None:
    wanted = params("warm", **extreme)
    assert all(len(t) == 24 for t in engines.generate(shared(checkpoints), wanted, GOOD))


@pytest.mark.parametrize(
    "greedy", [{"temperature": 1e-8}, {"temperature": 9e-6}, {"top_p": 1e-46}, {"top_p": 9e-8}]
)
def test_hardly_any_randomness_is_none(checkpoints: Checkpoints, greedy: dict[str, Any]) -> None:
    expected = checkpoints.expected("none", "greedy")
    for seed in (1, 2):
        wanted = params("greedy", seed=seed, **{"temperature": 1.0, **greedy})
        assert engines.generate(shared(checkpoints), wanted, GOOD) == expected


@cache
def shared(checkpoints: Checkpoints) -> LLM:
    return checkpoints.engine("none")
