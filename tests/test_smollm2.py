"""The embedded model, with real text, against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from atom import LLM, SamplingParams
from atom.config import ModelOptions
from atom.model_loader.source import resolve_model

NEW_TOKENS = 128
# Of the same answers, as many tokens as a comparison of two ways of computing them generates: at
# each commit of the first questions.
LENGTHS = [16, pytest.param(NEW_TOKENS, marks=pytest.mark.slow)]
FEW = 8
QUESTIONS = (
    "What is the capital of France?",
    "Explain why the sky is blue, in three sentences.",
    "Write a haiku about the sea.",
    "A train travels 120 km in 1.5 hours. What is its average speed?",
    "Write a Python function that reverses a string.",
    "List five fruits that are red.",
    "Translate 'good morning' into Spanish, French and German.",
    "Who wrote Pride and Prejudice, and when?",
    "What is the difference between a virus and a bacterium?",
    "Tom has 3 boxes with 12 pencils each and gives away 7. How many are left?",
    "Give me a recipe for pancakes.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "What does the HTTP status code 404 mean?",
    "Name three ways to save energy at home.",
    "Is 91 a prime number? Explain.",
    "Write a short email that asks a colleague to move a meeting to Friday.",
)


def create_llm(**overrides: Any) -> LLM:
    defaults = {
        "dtype": "float32",
        "quantization": "none",
        "max_model_len": 512,
        "max_num_seqs": 16,
    }
    return LLM(**{**defaults, **overrides}, no_speculation="method" not in overrides)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    llm = create_llm()
    return [llm.render_chat([{"role": "user", "content": q}]) for q in QUESTIONS]


Batched = Callable[[int], list[list[int]]]


@pytest.fixture(scope="module")
def batched(prompts: list[list[int]]) -> Batched:
    """The greedy tokens of prompts in one batch, up to so many of each."""
    return cache(lambda length: generate(create_llm(), asked(prompts, length), length))


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    folder = resolve_model(ModelOptions(dtype="float32", quantization="none")).path
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def asked(prompts: list[list[int]], length: int) -> list[list[int]]:
    return prompts if length == NEW_TOKENS else prompts[:FEW]


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int = NEW_TOKENS) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    llm.engine.core.block_pool.check_integrity()
    assert llm.engine.core.block_pool.num_used == 0
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens_are_those_of_transformers(
    length: int, prompts: list[list[int]], batched: Batched, reference: Any
) -> None:
    """Each token is the argmax of transformers' logits after the tokens before it.

    By induction these are the tokens that its own greedy generation yields.
    """
    for prompt, tokens in zip(asked(prompts, length), batched(length), strict=True):
        assert len(tokens) == length or tokens[-1] == 2
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0]
        assert logits[len(prompt) - 1 :].argmax(dim=-1).tolist() == tokens


@pytest.mark.slow
def test_greedy_generation_of_transformers(
    prompts: list[list[int]], batched: Batched, reference: Any
) -> None:
    for prompt, tokens in zip(prompts, batched(NEW_TOKENS), strict=True):
        generated = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
        assert generated[0, len(prompt) :].tolist() == tokens


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 16}, id="chunks of 16"),
        pytest.param(
            {"max_num_batched_tokens": 512, "enable_prefix_caching": False}, id="no prefix cache"
        ),
        pytest.param(
            {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
            id="chunks of 16, no prefix cache",
            marks=pytest.mark.slow,
        ),
        pytest.param({"method": "suffix", "num_speculative_tokens": 3}, id="suffix"),
        pytest.param(
            {"model_impl": "transformers"}, id="transformers' code", marks=pytest.mark.slow
        ),
    ],
)
def test_no_option_changes_a_token(
    options: dict[str, Any], length: int, prompts: list[list[int]], batched: Batched
) -> None:
    llm = create_llm(**options)
    prompts, expected = asked(prompts, length), batched(length)
    assert generate(llm, prompts, length) == expected
    if options.get("enable_prefix_caching", True):
        assert generate(llm, prompts, length) == expected  # now from the cache
        assert llm.engine.core.stats.prefix_cache_hits > 0


@pytest.mark.parametrize("length", LENGTHS)
def test_alone_as_in_a_batch(length: int, prompts: list[list[int]], batched: Batched) -> None:
    llm = create_llm()
    few = slice(len(prompts) if length == NEW_TOKENS else 4)
    alone = [generate(llm, [prompt], length)[0] for prompt in prompts[few]]
    assert alone == batched(length)[few]


@pytest.mark.parametrize(
    ("count", "length"), [(4, 20), pytest.param(8, 32, marks=pytest.mark.slow)]
)
def test_seeded_sampling_is_the_requests_own(
    count: int, length: int, prompts: list[list[int]]
) -> None:
    """With a seed the batch, the chunks and speculation change nothing; without, all differ."""
    seeded = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=length)
    llm = create_llm(max_num_batched_tokens=16, method="suffix", num_speculative_tokens=2)
    together = llm.generate(prompts[:count], seeded, use_tqdm=False)
    other = create_llm(enable_prefix_caching=False)
    for prompt, output in zip(prompts[:3], together, strict=False):
        alone = other.generate([prompt], seeded, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    free = SamplingParams(temperature=1.0, max_tokens=length)
    same_prompt = llm.generate([prompts[2]] * 4, free, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in same_prompt}) == 4
