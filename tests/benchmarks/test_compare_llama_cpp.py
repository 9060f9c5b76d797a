"""The comparison of a GGUF file's answers with llama.cpp's: arithmetic. llama.cpp does not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from atom import SamplingParams
from atom.outputs import Logprob

Module = Callable[[str], Any]


class FakeLLM:
    """Answers every prompt with 7, 8, and prefers 8 to 7 by `margin` along any text."""

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self.tokenizer = SimpleNamespace(encode=lambda text: [len(text)])

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams, use_tqdm: bool
    ) -> list[Any]:
        assert not use_tqdm
        if params.prompt_logprobs is None:
            answer = SimpleNamespace(token_ids=[7, 8])
            return [SimpleNamespace(outputs=[answer]) for _ in prompts]
        (prompt,) = prompts
        found = {8: Logprob(-1.0, 1, ""), 7: Logprob(-1.0 - self._margin, 2, "")}
        return [SimpleNamespace(prompt_logprobs=[None, *[found] * (len(prompt) - 1)])]


def their_answer(*tops: list[list[float]], prompt: int = 4) -> dict[str, Any]:
    return {"prompt": [prompt], "tokens": [int(top[0][0]) for top in tops], "top": tops}


@pytest.fixture
def module(benchmark_module: Module) -> Any:
    return benchmark_module("compare_llama_cpp")


def test_differences_have_the_margins_of_both(module: Any) -> None:
    answers = [
        their_answer([[7, 5.25], [8, 5.0]], [[8, 3.0], [7, 2.0]]),
        their_answer([[8, 3.0], [7, 2.0]], [[8, 3.0], [7, 2.0]], prompt=9),
    ]
    result = module.compare(FakeLLM(0.5), ["four", "five!"], answers)
    assert result.other_tokens == [1]
    assert result.same_answers == 1
    assert result.positions == 4
    assert result.differences == [module.Difference(0, 0, 8, 7, 0.5, 0.25)]
    # -0.5 beside 0.25, and 0.5 beside 1 three times.
    assert result.noise == pytest.approx(((0.75**2 + 3 * 0.5**2) / 4) ** 0.5)
    text = module.to_text(result, 2)
    assert "prompts of other tokens: [1]" in text
    assert "prompt 0, token 0: 8 here by 0.500, 7 there by 0.250" in text


@pytest.mark.parametrize(("margin", "most", "expected"), [(0.5, 0.5, True), (0.5, 0.4, False)])
def test_ties(module: Any, margin: float, most: float, expected: bool) -> None:
    assert module.is_tie(module.Difference(0, 0, 1, 2, margin, 0.1), most) is expected
    assert module.is_tie(module.Difference(0, 0, 1, 2, 0.1, margin), most) is expected


def test_a_token_that_is_not_among_the_likeliest_is_no_tie(module: Any) -> None:
    answers = [their_answer([[3, 5.0], [4, 1.0]])]
    (difference,) = module.compare(FakeLLM(0.5), ["four"], answers).differences
    assert not module.is_tie(difference, 100.0)


def test_prompts_are_twenty(module: Any) -> None:
    assert len(module.prompts()) == 20
