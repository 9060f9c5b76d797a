"""Allowed tokens, bad words and logits processors: what they do, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from spec_decode.engines import PROMPTS, create_engine, generate, params

from atom import LLM
from atom.sampling.logit_constraints import BadWords, TokenValues, allowed_mask, read_bad_words

NONE = TokenValues(torch.empty(0), torch.empty(0))
EXTENDED = PROMPTS[10:]  # repetitive, so that a lookup finds drafts


@pytest.fixture(scope="module")
def plain(tiny_llama_dir: Path) -> LLM:
    return create_engine(tiny_llama_dir)


@pytest.fixture(scope="module")
def drafting(tiny_llama_dir: Path) -> LLM:
    return create_engine(tiny_llama_dir, method="suffix", num_speculative_tokens=3)


def test_a_mask_has_the_bits_of_its_tokens() -> None:
    mask = allowed_mask([0, 31, 32, 40, 40], 41)
    assert mask.view("uint32").tolist() == [1 | 1 << 31, 1 | 1 << 8]


def test_words_end_where_their_beginning_stands() -> None:
    word = BadWords([7, 8], NONE)
    assert word.rows([1, 7, 8], [7, 8, 9]) == [0, 2]
    assert word.rows([7], [8, 7]) == [1]
    assert word.rows([], [7, 8]) == [2]
    assert word.rows([8], []) == []
    assert BadWords([], NONE).rows([], [1, 2]) == [0, 1, 2]


def test_words_of_one_beginning_are_one() -> None:
    made: list[dict[int, float]] = []

    def create(values: dict[int, float]) -> TokenValues:
        made.append(values)
        return NONE

    read = read_bad_words([[5], [6], [1, 2], [1, 3], [99]], 99, create)
    assert [word.prefix for word in read] == [[], [1]]
    assert [sorted(values) for values in made] == [[5, 6], [2, 3]]


def test_allowed_tokens_are_the_only_ones(plain: LLM, drafting: LLM) -> None:
    allowed = [5, 77, 300]
    wanted = params("warm", allowed_token_ids=allowed, logit_bias={5: -1.0})
    found = generate(plain, wanted, EXTENDED)
    assert {t for tokens in found for t in tokens} == set(allowed)
    assert generate(drafting, wanted, EXTENDED) == found


def test_no_end_comes_before_the_fewest_tokens(plain: LLM, drafting: LLM) -> None:
    free = generate(plain, params("greedy"), EXTENDED)
    ends = [tokens[1] for tokens in free]
    wanted = params("greedy", min_tokens=4, stop_token_ids=ends)
    found = generate(plain, wanted, EXTENDED)
    assert all(len(tokens) >= 4 and not {*tokens[:4]} & {*ends} for tokens in found)
    assert any(tokens[-1] in ends for tokens in found)
    assert generate(drafting, wanted, EXTENDED) == found


def bad_pairs(llm: LLM) -> list[list[int]]:
    """Pairs of tokens that the model writes when nothing keeps it from them."""
    free = generate(llm, params("warm", allowed_token_ids=[5, 77, 300]), EXTENDED)
    return [list(pair) for pair in sorted({*pairwise(free[0])})[:3]]


def test_bad_words_do_not_come(plain: LLM, drafting: LLM) -> None:
    bad = bad_pairs(plain)
    wanted = params("warm", allowed_token_ids=[5, 77, 300], bad_word_ids=bad)
    found = generate(plain, wanted, EXTENDED)
    pairs = {pair for tokens in found for pair in pairwise(tokens)}
    assert pairs
    assert pairs.isdisjoint(map(tuple, bad))
    assert generate(drafting, wanted, EXTENDED) == found


def test_bad_words_are_texts(plain: LLM) -> None:
    free = plain.generate([PROMPTS[0]], params("greedy"), False)[0].outputs[0]
    token = next(t for t in free.token_ids if plain.tokenizer.decode([t]).isascii())
    text = plain.tokenizer.decode([token])
    kept = plain.generate([PROMPTS[0]], params("greedy", bad_words=[text]), False)[0].outputs[0]
    assert token not in kept.token_ids


def recording(seen: set[tuple[int, ...]]) -> Callable[..., torch.Tensor]:
    """Bans what comes two tokens after a token of its own remainder; a function of the text."""

    def process(prompt: list[int], outputs: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.add(tuple(outputs))
        assert logits.dtype is torch.float32
        turned = sum(outputs[-2:]) % 3 + len(prompt) % 2
        logits[turned::4] = -torch.inf
        return logits

    return process


def test_processors_see_the_text_before_each_token(plain: LLM, drafting: LLM) -> None:
    seen: tuple[set[tuple[int, ...]], set[tuple[int, ...]]] = (set(), set())
    found = [
        generate(llm, params("warm", logits_processors=[recording(own)]), EXTENDED)
        for llm, own in zip((plain, drafting), seen, strict=True)
    ]
    assert found[0] == found[1]
    prefixes = {tuple(tokens[:i]) for tokens in found[0] for i in range(len(tokens))}
    assert seen[0] == prefixes
    assert seen[1] > prefixes  # and what was drafted


def test_processors_of_two_arguments_come_in_order(plain: LLM) -> None:
    def force(outputs: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([len(outputs)]), 0.0)

    def shift(_: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.roll(10)

    wanted: Any = params("greedy", logits_processors=[force, shift], max_tokens=4)
    assert generate(plain, wanted, [PROMPTS[0]]) == [[10, 11, 12, 13]]
    short = params("greedy", logits_processors=[lambda outputs, logits: logits[:3]])
    with pytest.raises(RuntimeError, match=r"must return the logits, \[\d+\], got"):
        plain.generate([PROMPTS[0]], short, False)
