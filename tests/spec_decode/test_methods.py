"""A method is a line of the table and the file with its proposer."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import pytest
import torch
from spec_decode import engines
from spec_decode.engines import PROMPTS, create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom.batch import Lookahead
from atom.config import ConfigError, EngineConfig, SpeculativeOptions
from atom.model_engine.arg_utils import add_engine_flags, engine_config, engine_options
from atom.model_loader.drafts.folder import DraftTarget
from atom.models.llama import LlamaForCausalLM
from atom.options.speculative_methods import SPECULATIVE_METHODS, SpeculativeMethod
from atom.spec_decode.factory import proposer_builder
from atom.spec_decode.proposers.base import NullProposer, Proposal, Proposer, VerifiedStep

ROOT = Path(__file__).parents[2]
CONTINUATIONS: dict[tuple[int, ...], list[int]] = {}


class ToyProposer(NullProposer):
    """Knows what comes."""

    reads_steps = True

    def __init__(self, lookahead: Lookahead) -> None:
        super().__init__(lookahead)
        self._prompts: dict[int, tuple[int, ...]] = {}

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        drafts = []
        for sequence, last in zip(step.sequences, step.last_rows.tolist(), strict=True):
            if sequence.start == 0:
                self._prompts[sequence.row] = tuple(sequence.token_ids)
            prompt = self._prompts[sequence.row]
            num_outputs = int(step.model_input.positions[last]) + 2 - len(prompt)
            drafts.append([*CONTINUATIONS[prompt][num_outputs:], *[0] * num_drafts][:num_drafts])
        return Proposal(torch.tensor(drafts))


def create_toy(options: SpeculativeOptions, config: EngineConfig, target: DraftTarget) -> Proposer:
    assert config.speculative is options
    assert isinstance(target.model, LlamaForCausalLM)
    assert target.source.name
    assert target.context.max_model_len > 0
    return ToyProposer(Lookahead(options.num_speculative_tokens))


def add_method(monkeypatch: pytest.MonkeyPatch, **facts: bool) -> None:
    method = SpeculativeMethod(f"{__name__}:create_toy", **facts)
    monkeypatch.setitem(SPECULATIVE_METHODS, "toy", method)


def test_a_line_makes_a_method(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = PROMPTS[:3]
    target = engines.write_target("llama", tmp_path, byte_level_tokenizer)
    expected = generate(create_engine(target), params("greedy"), prompts)
    known = {tuple(p): tokens for p, tokens in zip(prompts, expected, strict=True)}
    monkeypatch.setitem(globals(), "CONTINUATIONS", known)
    known = "eagle3, dflash, dflash2, dspark, draft_model, mtp, suffix"
    with pytest.raises(ConfigError, match=f"method must be one of {known}; got 'toy'"):
        create_engine(target, method="toy", num_speculative_tokens=3)
    add_method(monkeypatch)
    engine = create_engine(target, method="toy", num_speculative_tokens=3)
    assert generate(engine, params("greedy"), prompts) == expected
    stats = engine.engine.core.stats.spec_decode
    assert stats is not None
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert list(stats.by_source) == ["toy"]


def test_a_line_makes_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    add_method(monkeypatch)
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    line = "--method toy --num-speculative-tokens 2 --speculative-lookup"
    found = engine_config(**engine_options(parser.parse_args(line.split()))).speculative
    assert found == SpeculativeOptions("toy", 2, lookup=True)


def test_the_line_says_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    add_method(monkeypatch, takes_draft_model=True)
    with pytest.raises(ConfigError, match="method toy needs a draft model"):
        SpeculativeOptions("toy", 2)
    with pytest.raises(ConfigError, match=r"is for method suffix .*, not for toy alone"):
        SpeculativeOptions("toy", 2, "D", suffix_cache_tokens=5)
    add_method(monkeypatch, is_lookup=True)
    with pytest.raises(ConfigError, match="method toy takes no draft model, got 'D'"):
        SpeculativeOptions("toy", 2, "D")
    with pytest.raises(ConfigError, match=r"goes beside a draft \(eagle3 or .* mtp\); method toy"):
        SpeculativeOptions("toy", 2, lookup=True)
    assert SpeculativeOptions("toy", 2, suffix_cache_tokens=5).looks_up


@pytest.mark.parametrize("method", SPECULATIVE_METHODS)
def test_every_method_has_a_builder(method: str) -> None:
    assert callable(proposer_builder(method))


def test_no_method_is_asked_for_by_name() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "atom").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Compare, ast.MatchValue))
        for value in ast.walk(node)
        if isinstance(value, ast.Constant) and value.value in tuple(SPECULATIVE_METHODS)
    ]
    assert wrong == []
