"""An engine of several ranks generates what one of a single rank does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import engines_of_threads
from spec_decode.engines import PROMPTS, SETTINGS, create_engine, generate, params, write_target
from transformers import PreTrainedTokenizerFast

from atom import LLM


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    return write_target("llama", tmp_path_factory.mktemp("llama"), byte_level_tokenizer)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    with create_engine(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[LLM]:
    with engines_of_threads(), create_engine(folder, tensor_parallel_size=2) as engine:
        yield engine


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_tokens(alone: LLM, pair: LLM, setting: str) -> None:
    assert generate(pair, params(setting)) == generate(alone, params(setting))


def test_logprobs_come_from_the_first_rank(alone: LLM, pair: LLM) -> None:
    sampling = params("greedy", logprobs=2, prompt_logprobs=1, max_tokens=4)
    [own], [other] = (engine.generate([PROMPTS[3]], sampling) for engine in (alone, pair))
    for mine, theirs in zip(
        [*own.prompt_logprobs[1:], *own.outputs[0].logprobs],
        [*other.prompt_logprobs[1:], *other.outputs[0].logprobs],
        strict=True,
    ):
        assert mine.keys() == theirs.keys()
        assert [mine[token].logprob for token in mine] == pytest.approx(
            [theirs[token].logprob for token in mine], abs=1e-5
        )


def test_a_request_that_fails_while_sampling_ends_alone(pair: LLM) -> None:
    def broken(_: list[int], __: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing")

    with pytest.raises(Exception, match="no such thing"):
        pair.generate([PROMPTS[0]], params("greedy", logits_processors=[broken]))
    assert generate(pair, params("greedy"))
