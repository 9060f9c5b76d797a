"""Unseeded samples with speculation follow the target's distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from spec_decode import draft_bench, engines
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.batch import Lookahead
from atom.model_engine import worker
from atom.model_ops.kernels.native import sampling as native_sampling
from atom.model_ops.kernels.native.build import native_build
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.proposers.base import (
    DraftSampler,
    NullProposer,
    Proposal,
    Proposer,
    VerifiedStep,
)
from atom.spec_decode.suffix_index import Continuation
from atom.spec_decode.suffix_lookup import SuffixLookup

TOP_K = 3
TEMPERATURE = 2.0
NUM_SAMPLES = 50_000
# Of which each commit draws so many.
FEW_SAMPLES = 15_000
NUM_TOKENS = 4
NUM_DRAFTS = NUM_TOKENS - 2
# Tokens of the draft model's vocabulary.
_NUM_KNOWN = 8


class GuessLookup(SuffixLookup):
    """Drafts the likeliest continuation, which a sample follows now and then."""

    def __init__(self, distribution: dict[tuple[int, ...], float]) -> None:
        super().__init__("guess", NUM_DRAFTS)
        self._distribution = distribution
        self._guess = cache(self._likeliest)

    def find(
        self, row: int, prompt: Sequence[int], outputs: Sequence[int], more: int = 0
    ) -> Continuation:
        drafts = [*self._guess(tuple(outputs)), *(0,) * NUM_DRAFTS][:NUM_DRAFTS]
        return Continuation(drafts, [1.0] * NUM_DRAFTS)

    def _likeliest(self, known: tuple[int, ...]) -> tuple[int, ...]:
        matching = [key for key in self._distribution if key[: len(known)] == known]
        return max(matching, key=lambda key: self._distribution[key])[len(known) :]


class MarginalProposer(NullProposer):
    """Races with the probabilities of each place, whatever came before."""

    reads_steps = True

    def __init__(self, distribution: dict[tuple[int, ...], float], start: int, vocab_size: int):
        super().__init__(Lookahead(NUM_DRAFTS))
        weights = torch.zeros(NUM_TOKENS, vocab_size)
        for key, probability in distribution.items():
            weights[range(NUM_TOKENS), key] += probability
        self._logits = TEMPERATURE * weights.log()
        self._start = start
        self._choice = DraftSampler()

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        positions = step.model_input.positions[step.last_rows]
        drafts = []
        for ahead in range(2, 2 + num_drafts):
            places = (positions + ahead - self._start).clamp(max=NUM_TOKENS - 1)
            logits = self._logits[places]
            chosen = self._choice.choose(logits, step.draft_sampling, positions, ahead=ahead)
            drafts.append(chosen.token_ids)
        return Proposal(torch.stack(drafts, dim=1))


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["coupled", "guess"])
def test_chi_square(
    drafts: str,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """50,000 continuations of four tokens, against the probabilities of transformers' logits.

    The first token comes from the prompt's step, the others from rows that verified drafts: the
    likeliest tokens, or the winners of races with the noise of the samples.
    """
    checkpoint, prompt = _target(tmp_path, byte_level_tokenizer)
    vocab_size = len(byte_level_tokenizer)
    expected = _distribution(checkpoint, prompt)

    def create(_: object, proposer: Proposer, **__: bool) -> Drafter:
        lookup = GuessLookup(expected) if drafts == "guess" else None
        return Drafter(proposer, drafts, lookup, None, sync_is_free=True)

    def create_proposer(*_: object) -> Proposer:
        return MarginalProposer(expected, len(prompt), vocab_size)

    if drafts == "coupled":
        monkeypatch.setattr(worker, "create_proposer", create_proposer)
    with engines.drafters_from(monkeypatch, create):
        # The engine's seed makes the requests' own seeds, and so this test, repeatable.
        engine = engines.create_engine(
            tmp_path,
            seed=0,
            max_num_seqs=512,
            method="suffix",
            num_speculative_tokens=NUM_DRAFTS,
        )
    _check(engine, prompt, expected, NUM_SAMPLES)


@pytest.mark.skipif(native_build().reason is not None, reason="needs the native kernels")
@pytest.mark.parametrize(
    "num_samples", [FEW_SAMPLES, pytest.param(NUM_SAMPLES, marks=pytest.mark.slow)]
)
def test_chi_square_of_a_draft_model(
    num_samples: int,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same with an Eagle3 draft of random weights, which knows few tokens, those that are
    likely here, and the kernel that chooses its drafts.
    """
    checkpoint, prompt = _target(tmp_path / "target", byte_level_tokenizer)
    expected = _distribution(checkpoint, prompt)
    draft = _write_draft(tmp_path / "draft", expected, len(byte_level_tokenizer))
    calls = []
    kernel = native_sampling.choose_drafts

    def choose_drafts(*args: Any) -> Any:
        calls.append(args)
        return kernel(*args)

    monkeypatch.setattr(native_sampling, "choose_drafts", choose_drafts)
    engine = engines.create_engine(
        tmp_path / "target",
        seed=0,
        max_num_seqs=512,
        method="eagle3",
        draft_model=str(draft),
        num_speculative_tokens=NUM_DRAFTS,
    )
    _check(engine, prompt, expected, num_samples)
    assert calls


def _target(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> tuple[checkpoints.Checkpoint, list[int]]:
    """A target and a prompt."""
    checkpoint = checkpoints.llama(folder, vocab_size=len(tokenizer), hidden_size=engines.HIDDEN)
    tokenizer.save_pretrained(folder)
    return checkpoint, checkpoints.prompt(9) * 2


def _write_draft(folder: Path, distribution: dict[tuple[int, ...], float], vocab_size: int) -> Path:
    """A draft that knows the likeliest tokens of all places behind the first."""
    weights = torch.zeros(vocab_size)
    for key, probability in distribution.items():
        weights[list(key[1:])] += probability
    known = weights.topk(_NUM_KNOWN).indices.sort().values
    sizes = {"hidden_size": engines.HIDDEN, "vocab_size": vocab_size}
    raw = {**draft_bench.MHA, **sizes, "draft_vocab_size": _NUM_KNOWN}
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    tensors = draft_bench.draft_tensors(raw)
    tensors["d2t"] = known - torch.arange(_NUM_KNOWN)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, known, True)
    return draft_bench.write_draft(folder, raw, tensors)


def _check(
    engine: LLM, prompt: list[int], expected: dict[tuple[int, ...], float], num_samples: int
) -> None:
    """So many continuations follow the probabilities."""
    sampling = SamplingParams(
        temperature=TEMPERATURE, top_k=TOP_K, max_tokens=NUM_TOKENS, ignore_eos=True, n=100
    )
    outputs = engine.generate([prompt] * (num_samples // 100), sampling, use_tqdm=False)
    counts: dict[tuple[int, ...], int] = {}
    for output in outputs:
        for completion in output.outputs:
            key = tuple(completion.token_ids)
            counts[key] = counts.get(key, 0) + 1
    stats = engine.engine.core.stats.spec_decode
    assert stats is not None
    assert stats.num_accepted_tokens > 1000  # the accepting path was taken as well
    assert set(counts) <= set(expected)
    statistic = sum(
        (counts.get(key, 0) - p * num_samples) ** 2 / (p * num_samples)
        for key, p in expected.items()
    )
    degrees = len(expected) - 1
    # Five standard deviations of a chi-square variable.
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


def _distribution(
    checkpoint: checkpoints.Checkpoint, prompt: list[int]
) -> dict[tuple[int, ...], float]:
    """The probability of each continuation of `NUM_TOKENS` tokens."""
    result = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, probability in result.items():
            logits = checkpoint.logits([*prompt, *prefix])[-1].double() / TEMPERATURE
            top = torch.topk(logits, TOP_K)
            weights = torch.softmax(top.values, dim=-1).tolist()
            for token_id, weight in zip(top.indices.tolist(), weights, strict=True):
                longer[(*prefix, token_id)] = probability * weight
        result = longer
    assert len(result) == len(list(product(range(TOP_K), repeat=NUM_TOKENS)))
    return result
