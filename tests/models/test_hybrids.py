"""Models with recurrent states: transformers' logits and tokens, however sequences are run."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import edit_config, prompt
from models.harness import ModelBench, load_model, split
from models.hybrids import (
    HYBRIDS,
    HybridCheckpoint,
    ReferencePrediction,
    add_prediction_layer,
    list_layers,
    rename_as_transformers,
    wrap_as_seeing,
    write_hybrid,
)
from ranks import engines_of_threads, run_ranks
from spec_decode import engines
from spec_decode.engines import create_engine, generate
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.config import ConfigError
from atom.graphs.capture import ReexecuteBackend
from atom.kv_cache.base import KVCacheMemoryError, KVCachePlan
from atom.model_engine.scheduling import checkpoints
from atom.model_engine.start_up import kv_memory
from atom.model_engine.step import planned_graphs
from atom.model_engine.step.input_buffers import InputBuffers
from atom.model_ops.attention.recurrent_layer import StatePart
from atom.model_ops.kernels.native.build import native_build

TOLERANCE = 1e-4
LENGTH = 26
NEW_TOKENS = 10
K = 3
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
# Long enough for lookups, which draft late where steps overlap.
LONG = {
    "greedy": SamplingParams(temperature=0, max_tokens=28, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, seed=3, max_tokens=28, ignore_eos=True),
}
FAMILIES = [name for name in HYBRIDS if "-" not in name]
WITH_PREDICTION = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
PAIR = ["qwen3_next", "kimi_linear"]
# Of a model with sparse attention: sizes that the C++ kernels take.
SPARSE = {"hidden_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 32, "v_head_dim": 16}
# A prompt in which a lookup finds drafts, one that is longer than the versions, a short one.
PROMPTS = [prompt(5, seed=4) * 4, prompt(19), prompt(2, seed=1)]


class Hybrids:
    """Checkpoints with a tokenizer, and an Eagle3 draft for all of them, each made once."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self.prediction: dict[str, dict[str, torch.Tensor]] = {}
        self.checkpoint = cache(self._checkpoint)
        self.target = cache(self._target)
        self.draft = cache(self._draft)
        self.expected = cache(self._expected)

    def _checkpoint(self, name: str) -> HybridCheckpoint:
        checkpoint = write_hybrid(name, self._folder / name, vocab_size=len(self._tokenizer))
        if name in WITH_PREDICTION:
            self.prediction[name] = add_prediction_layer(checkpoint)
        self._tokenizer.save_pretrained(checkpoint.folder)
        return checkpoint

    def _target(self, name: str) -> Path:
        """A hybrid, or a model whose attention is sparse."""
        if name in HYBRIDS:
            return self.checkpoint(name).folder
        return engines.write_target(name, self._folder / name, self._tokenizer, **SPARSE)

    def _draft(self, kind: str, hidden_size: int) -> str:
        folder, vocab = self._folder / f"{kind} {hidden_size}", len(self._tokenizer)
        return str(engines.write_draft(kind, folder, vocab, hidden_size=hidden_size))

    def _expected(self, name: str, sampling: str) -> list[list[int]]:
        """What an engine that never drafts writes, op by op."""
        engine = create_engine(self.target(name), enforce_eager=True)
        return generate(engine, LONG[sampling], PROMPTS)


@pytest.fixture(scope="module")
def hybrids(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Hybrids:
    return Hybrids(tmp_path_factory.mktemp("hybrids"), byte_level_tokenizer)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit by bit with C++ kernels; torch's exponentials hang on where a number lies."""
    if native_build().reason is None:
        assert torch.equal(found, expected)
    else:
        assert_close(found, expected)


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_in_every_split(hybrids: Hybrids, name: str) -> None:
    checkpoint = hybrids.checkpoint(name)
    bench = ModelBench(checkpoint.folder)
    tokens = prompt(LENGTH)
    expected = checkpoint.logits(tokens)
    assert_close(bench.run(tokens, [LENGTH], "whole"), expected)
    assert_close(bench.run(tokens, [11, 7, 1], "chunked"), expected)
    others = {str(seed): prompt(6 + 5 * seed, seed) for seed in (1, 2, 3)}
    pieces = {key: split(ids, [4 * int(key), 3, 1]) for key, ids in others.items()}
    found = bench.run_beside(pieces)
    for key, ids in others.items():
        assert_close(found[key], checkpoint.logits(ids))


@pytest.mark.parametrize("name", PAIR)
def test_chunks_may_end_anywhere(hybrids: Hybrids, name: str) -> None:
    bench = ModelBench(hybrids.checkpoint(name).folder)
    tokens = prompt(14, seed=2)
    whole = bench.run(tokens, [14], "whole")
    for first in range(1, 14):
        assert_same(bench.run(tokens, [first, 14], str(first)), whole)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = write_hybrid(name, tmp_path)
    tokens = prompt(6)
    before = ModelBench(tmp_path).run(tokens, [6])
    rename_as_transformers(checkpoint)
    assert torch.equal(ModelBench(tmp_path).run(tokens, [6]), before)


@pytest.mark.parametrize(
    ("name", "architecture", "model_type"),
    [
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    ],
)
def test_text_models_of_models_that_see(
    name: str,
    architecture: str,
    model_type: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = write_hybrid(name, tmp_path)
    tokens = prompt(6)
    before = ModelBench(tmp_path).run(tokens, [6])
    wrap_as_seeing(checkpoint, architecture, model_type)
    with caplog.at_level(logging.INFO, logger="atom"):
        found = ModelBench(tmp_path, limit_mm_per_prompt={"image": 0}).run(tokens, [6])
    assert torch.equal(found, before)
    assert sum("vision weights are skipped" in record.message for record in caplog.records) == 1


def test_layers_of_kimi_linear_as_published(tmp_path: Path) -> None:
    checkpoint = write_hybrid("kimi_linear", tmp_path)
    tokens = prompt(6)
    before = ModelBench(tmp_path).run(tokens, [6])
    list_layers(checkpoint)
    assert torch.equal(ModelBench(tmp_path).run(tokens, [6]), before)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks(hybrids: Hybrids, name: str) -> None:
    checkpoint = hybrids.checkpoint(name)
    tokens = prompt(LENGTH)
    found = run_ranks(2, lambda g: ModelBench(checkpoint.folder, group=g).run(tokens, [23, 1]))
    assert_close(found[0], checkpoint.logits(tokens))


@pytest.mark.parametrize("name", FAMILIES)
def test_four_ranks(hybrids: Hybrids, name: str, tmp_path: Path) -> None:
    """Heads of keys and values in full attention are two, so two ranks each have the same."""
    checkpoint = hybrids.checkpoint(name)
    if name != "kimi_linear":
        checkpoint = write_hybrid(name, tmp_path, linear_num_key_heads=4)
    tokens = prompt(LENGTH)
    found = run_ranks(4, lambda g: ModelBench(checkpoint.folder, group=g).run(tokens, [23, 1]))
    assert_close(found[0], checkpoint.logits(tokens))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe", "kimi_linear"])
def test_ranks_that_hold_whole_experts(hybrids: Hybrids, name: str) -> None:
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    prompts = PROMPTS[:2]
    expected = [greedy(hybrids.checkpoint(name), tokens) for tokens in prompts]
    folder = hybrids.checkpoint(name).folder
    with engines_of_threads(), create_engine(folder, **options) as engine:
        assert generate(engine, GREEDY, prompts) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_quantised_when_loaded(hybrids: Hybrids, name: str) -> None:
    checkpoint = hybrids.checkpoint(name)
    tokens = prompt(LENGTH)
    bench = ModelBench(checkpoint.folder, quantization="int8")
    found, expected = bench.run(tokens, [LENGTH]), checkpoint.logits(tokens)
    # A flipped choice of experts moves single rows, so only the bulk is compared.
    assert (found - expected).abs().median() < 0.2 * expected.std()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens(
    hybrids: Hybrids, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Preempted, and after a prefix whose state was kept."""
    monkeypatch.setattr(checkpoints, "LEAST_TOKENS", 4)
    caplog.set_level(logging.INFO, logger="atom")
    checkpoint = hybrids.checkpoint(name)
    shared = prompt(20)
    prompts = [[*shared, *prompt(n, seed=n)] for n in (1, 6, 15)]
    expected = [greedy(checkpoint, token_ids) for token_ids in prompts]
    with monkeypatch.context() as patch:
        patch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(16, 0))
        engine = create_engine(checkpoint.folder, max_model_len=60)
    assert generate(engine, GREEDY, prompts) == expected
    assert engine.engine.core.stats.num_preemptions > 0
    again = engine.generate(prompts[1:], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == expected[1:]
    assert any(output.num_cached_tokens for output in again)
    assert sum("32 recurrent states are kept" in r.message for r in caplog.records) == 1


def greedy(checkpoint: HybridCheckpoint, token_ids: list[int]) -> list[int]:
    with torch.inference_mode():
        rest, cache_, tokens = list(token_ids), None, []
        while len(tokens) < NEW_TOKENS:
            for token in rest:
                output = checkpoint.reference(
                    torch.tensor([[token]]), past_key_values=cache_, use_cache=True
                )
                cache_ = output.past_key_values
            rest = [int(output.logits[0, -1].argmax())]
            tokens += rest
    return tokens


DRAFTS = ("suffix", "eagle3", "dspark")
RUNS = ("op by op", "recorded", "graphs")
WITH_DRAFTS = {
    "kimi_linear": DRAFTS,
    "qwen3_next": (*DRAFTS, "mtp"),
    "deepseek_v32": (*DRAFTS, "mtp"),
}


def _grid() -> Iterator[object]:
    """Each model and method with and without overlap at each commit, in turn op by op, recorded and
    in graphs; all of them with `--run-slow`.
    """
    pairs = [(name, method) for name, methods in WITH_DRAFTS.items() for method in methods]
    for number, (name, method) in enumerate(pairs):
        turn = number + [*WITH_DRAFTS].index(name)
        for overlap, (i, run) in itertools.product((False, True), enumerate(RUNS)):
            marks = () if (turn + overlap) % len(RUNS) == i else (pytest.mark.slow,)
            yield pytest.param(name, method, overlap, run, marks=marks)


def speculating(
    hybrids: Hybrids, name: str, method: str, run: str, patch: pytest.MonkeyPatch, **options: Any
) -> LLM:
    kind = {"eagle3": "mha", "dspark": "dspark"}.get(method)
    if kind is not None:
        size = engines.HIDDEN if name in HYBRIDS else SPARSE["hidden_size"]
        options["draft_model"] = hybrids.draft(kind, size)
    with patch.context() as context:
        if run == "graphs":
            context.setattr(planned_graphs, "capture_backend", lambda _: ReexecuteBackend())
        return create_engine(
            hybrids.target(name),
            method=method,
            num_speculative_tokens=K,
            speculative_adaptive=False,
            enforce_eager=run == "op by op",
            max_num_batched_tokens=16,
            max_num_seqs=4,
            **options,
        )


@pytest.mark.parametrize(("name", "method", "overlap", "run"), [*_grid()])
def test_drafts_change_no_token(
    hybrids: Hybrids,
    name: str,
    method: str,
    overlap: bool,
    run: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Prompts come in chunks of at most 16 tokens, beside sequences that verify drafts."""
    caplog.set_level(logging.INFO, logger="atom")
    engine = speculating(hybrids, name, method, run, monkeypatch, overlap=overlap)
    for sampling, given in LONG.items():
        assert generate(engine, given, PROMPTS) == hybrids.expected(name, sampling)
    assert engine.engine.core.stats.spec_decode.num_draft_tokens > 0
    if native_build().reason is None and run == "recorded":
        assert not [r.getMessage() for r in caplog.records if "op by op" in r.getMessage()]


@pytest.mark.parametrize("name", PAIR)
def test_drafts_and_chunks_change_no_token_of_states_in_bfloat16(
    hybrids: Hybrids, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts op by op against chunks and drafts, where bits are promised, too."""
    folder = hybrids.checkpoint(name).folder
    halved = {"mamba_ssm_cache_dtype": "bfloat16"}
    alone = create_engine(folder, enforce_eager=True, **halved)
    expected = generate(alone, LONG["greedy"], PROMPTS)
    engine = speculating(
        hybrids, name, "suffix", "recorded", monkeypatch, batch_invariant=True, **halved
    )
    assert generate(engine, LONG["greedy"], PROMPTS) == expected
    assert engine.engine.core.stats.spec_decode.num_draft_tokens > 0


@pytest.mark.parametrize("name", PAIR)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=lambda d: f"{d} states")
def test_verified_tokens_are_single_ones(hybrids: Hybrids, name: str, stored: torch.dtype) -> None:
    """Whatever was accepted of a step's drafts, the next one goes on from there."""
    bench = ModelBench(hybrids.checkpoint(name).folder, most_drafts=K, state_dtype=stored)
    tokens = prompt(22, seed=7)
    expected = bench.run(tokens, [9, 1], "single")
    assert_same(rejecting(bench, tokens), expected)


def rejecting(bench: ModelBench, tokens: list[int]) -> torch.Tensor:
    """The logits of tokens, each of which some step before it has verified among wrong ones."""
    logits = [bench.step({"some": tokens[:9]})["some"]]
    start, accepted = 9, itertools.cycle((0, 3, 1, 2))
    while start < len(tokens):
        right = tokens[start : start + 1 + next(accepted)]
        wrong = [(token + 1) % 50 + 3 for token in tokens[start + len(right) : start + K + 1]]
        logits.append(bench.step({"some": right + wrong})["some"][: len(right)])
        start += len(right)
        bench.rewind("some", start)
    return torch.cat(logits)


def test_a_version_too_few_is_noticed(hybrids: Hybrids, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePart, "num_versions", lambda self, most: most + self.reach - 1)
    bench = ModelBench(hybrids.checkpoint("qwen3_next").folder, most_drafts=K)
    tokens = prompt(22, seed=7)
    found, expected = rejecting(bench, tokens), bench.run(tokens, [9, 1], "single")
    assert (found - expected).abs().max() > 0.01


def test_padding_that_writes_is_noticed(hybrids: Hybrids, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if padding had the row of a sequence."""
    pad = InputBuffers.pad
    monkeypatch.setattr(InputBuffers, "pad", lambda own, size, rows, _: pad(own, size, rows, 0))
    engine = speculating(hybrids, "qwen3_next", "suffix", "graphs", monkeypatch)
    assert generate(engine, LONG["greedy"], PROMPTS) != hybrids.expected("qwen3_next", "greedy")


def test_no_source_drafts_more_than_there_are_versions(
    hybrids: Hybrids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup beside a draft makes up to 15 drafts where a model has no states."""
    engine = speculating(
        hybrids, "kimi_linear", "eagle3", "graphs", monkeypatch, speculative_lookup=True
    )
    assert engine.engine.core.executor.parts.drafter.max_drafts == K


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_states_that_do_not_fit_are_refused_with_numbers(hybrids: Hybrids, stored: str) -> None:
    folder = hybrids.checkpoint("kimi_linear").folder
    # Two layers, four matrices of 12 x 12, and three inputs of 144 channels in float32.
    number = 4 if stored == "float32" else 2
    row = 2 * (number * 4 * 4 * 12 * 12 + 4 * (K + 3) * 144)
    slot = 2 * (number * 4 * 12 * 12 + 4 * 3 * 144)
    size = 17 * row + 5 * slot
    with pytest.raises(KVCacheMemoryError, match=rf"17 x {row} \+ 5 x {slot} = {size} bytes"):
        create_engine(
            folder,
            method="suffix",
            num_speculative_tokens=K,
            state_slots=5,
            mamba_ssm_cache_dtype=stored,
            kv_cache_memory=str(size),
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope=False"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate=True is not supported"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
        (
            {"layer_types": ["linear_attention", "conv", "full_attention"]},
            "layer_types says 'conv'",
        ),
        (
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [2]}},
            "should list full_attn_layers and kda_layers",
        ),
        (
            {
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 2]},
            },
            "each of the layers 1 to 3 once",
        ),
    ],
)
def test_what_kimi_linear_does_not_have(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_hybrid("kimi_linear", tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, 32)


@pytest.mark.parametrize("name", WITH_PREDICTION)
def test_drafts_of_prediction_layers(
    hybrids: Hybrids, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first draft behind each text is that of transformers' layer."""
    checkpoint = hybrids.checkpoint(name)
    reference = ReferencePrediction(checkpoint, hybrids.prediction[name])
    with engines.drafts_recorded(monkeypatch) as recorded:
        engine = create_engine(
            checkpoint.folder, method="mtp", num_speculative_tokens=2, speculative_adaptive=False
        )
        prompts = [prompt(5), prompt(12)]
        assert generate(engine, GREEDY, prompts) == [greedy(checkpoint, ids) for ids in prompts]
    (drafts,) = recorded
    assert len(drafts) > 10
    for text, made in drafts.items():
        assert made[0] == reference.draft([*text])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2 is not supported"),
        ({}, "saved without its prediction layers"),
    ],
)
def test_prediction_layers_that_cannot_draft(
    fields: dict[str, int],
    message: str,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    checkpoint = write_hybrid("qwen3_5", tmp_path, vocab_size=len(byte_level_tokenizer))
    if fields:
        add_prediction_layer(checkpoint)
    edit_config(tmp_path, **fields)
    byte_level_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        create_engine(tmp_path, method="mtp", num_speculative_tokens=1)


def test_kimi_linear_has_no_prediction_layers(hybrids: Hybrids) -> None:
    with pytest.raises(ConfigError, match="method mtp needs prediction layers"):
        create_engine(
            hybrids.checkpoint("kimi_linear").folder, method="mtp", num_speculative_tokens=1
        )


def test_a_draft_model_with_states_is_refused(hybrids: Hybrids) -> None:
    folder = str(hybrids.checkpoint("qwen3_5").folder)
    with pytest.raises(ConfigError, match="recurrent states"):
        create_engine(
            hybrids.checkpoint("kimi_linear").folder,
            method="draft_model",
            draft_model=folder,
            num_speculative_tokens=1,
        )
