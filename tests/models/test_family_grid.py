"""Every family of `families.py`: transformers' logits and tokens, however sequences are run."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path

import pytest
import torch
from models.checkpoints import Checkpoint, prompt
from models.families import FAMILIES, TEXT_MODELS, write_family
from models.harness import ModelBench, split
from ranks import run_ranks
from safetensors.torch import load_file
from spec_decode import engines
from spec_decode.engines import create_engine, generate
from spec_decode.mtp_reference import add_mtp_layers
from transformers import PreTrainedTokenizerFast

from atom import SamplingParams
from atom.config import ConfigError
from atom.kv_cache.base import KVCachePlan
from atom.model_engine.start_up import kv_memory
from atom.model_ops.kernels.native.build import native_build

TOLERANCE = 1e-4
LENGTH = 30
NEW_TOKENS = 10
# Without those that differ only in what a logit shows.
ENGINES = [
    *(name for name in FAMILIES if "-" not in name or name == "mistral-window"),
    *(name for name in TEXT_MODELS if "-" not in name),
]
WITH_PREDICTION_LAYERS = ["glm4_moe", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


class Families:
    """Checkpoints with a tokenizer, and an Eagle3 draft for all of them, each made once."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self.checkpoint = cache(self._checkpoint)
        self.draft = cache(self._draft)

    def _checkpoint(self, name: str) -> Checkpoint:
        size = len(self._tokenizer)
        checkpoint = write_family(name, self._folder / name, vocab_size=size)
        self._tokenizer.save_pretrained(checkpoint.folder)
        return checkpoint

    def _draft(self) -> str:
        return str(engines.write_draft("mha", self._folder / "draft", len(self._tokenizer)))


@pytest.fixture(scope="module")
def families(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Families:
    return Families(tmp_path_factory.mktemp("families"), byte_level_tokenizer)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [*FAMILIES, *TEXT_MODELS])
def test_logits_in_every_split(families: Families, name: str) -> None:
    checkpoint = families.checkpoint(name)
    bench = ModelBench(checkpoint.folder)
    tokens = prompt(LENGTH)
    expected = checkpoint.logits(tokens)
    assert_close(bench.run(tokens, [LENGTH], "whole"), expected)
    assert_close(bench.run(tokens, [11, 7, 1], "chunked"), expected)
    others = {str(seed): prompt(12 + 5 * seed, seed) for seed in (1, 2, 3)}
    pieces = {key: split(ids, [4 * int(key), 3, 1]) for key, ids in others.items()}
    found = bench.run_beside(pieces)
    for key, ids in others.items():
        assert_close(found[key], checkpoint.logits(ids))


@pytest.mark.parametrize("name", ENGINES)
def test_two_ranks(families: Families, name: str) -> None:
    checkpoint = families.checkpoint(name)
    tokens = prompt(LENGTH)
    found = run_ranks(2, lambda g: ModelBench(checkpoint.folder, group=g).run(tokens, [23, 1]))
    assert_close(found[0], checkpoint.logits(tokens))


def test_a_norm_over_heads_that_two_ranks_share(tmp_path: Path) -> None:
    checkpoint = write_family("olmo2", tmp_path, num_key_value_heads=1)
    tokens = prompt(LENGTH)
    found = run_ranks(2, lambda g: ModelBench(tmp_path, group=g).run(tokens, [LENGTH]))
    assert_close(found[0], checkpoint.logits(tokens))


@pytest.mark.parametrize("name", ENGINES)
def test_quantised_when_loaded(families: Families, name: str) -> None:
    checkpoint = families.checkpoint(name)
    tokens = prompt(LENGTH)
    bench = ModelBench(checkpoint.folder, quantization="int8")
    found, expected = bench.run(tokens, [LENGTH]), checkpoint.logits(tokens)
    # A flipped choice of experts moves single rows, so only the bulk is compared.
    assert (found - expected).abs().median() < 0.1 * expected.std()


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_tokens(
    families: Families,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After a prefix hit, preempted, and with a draft, from steps that are recorded."""
    caplog.set_level(logging.INFO, logger="atom")
    checkpoint = families.checkpoint(name)
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
    speculating = create_engine(
        checkpoint.folder,
        method="eagle3",
        draft_model=families.draft(),
        num_speculative_tokens=2,
    )
    assert generate(speculating, GREEDY, prompts) == expected
    if native_build().reason is None:
        assert not [r.getMessage() for r in caplog.records if "op by op" in r.getMessage()]


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_lite", "minimax_m2", "deepseek_v32"])
def test_longer_contexts_by_yarn(name: str, tmp_path: Path) -> None:
    partial = {} if name in ("glm4_moe_lite", "deepseek_v32") else {"partial_rotary_factor": 0.5}
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        **partial,
    }
    checkpoint = write_family(name, tmp_path, rope_parameters=yarn)
    tokens = prompt(LENGTH)
    assert_close(ModelBench(tmp_path).run(tokens, [LENGTH]), checkpoint.logits(tokens))


@pytest.mark.parametrize(
    "name", ["qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "glm4_moe_lite", "minimax_m2"]
)
def test_experts_in_one_tensor(name: str, tmp_path: Path) -> None:
    """As transformers names them, where the hub has a tensor for each expert."""
    checkpoint = write_family(name, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    checkpoint.reference.save_pretrained(tmp_path, save_original_format=False)
    changed = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in changed.keys() - saved.keys())
    tokens = prompt(LENGTH)
    assert_close(ModelBench(tmp_path).run(tokens, [LENGTH]), checkpoint.logits(tokens))


def test_minimax_m2_as_published(tmp_path: Path) -> None:
    checkpoint = write_family("minimax_m2", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    published = {
        "rope_theta": 5000000,
        "rotary_dim": 8,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "attn_type_list": [1, 1, 1],
        "shared_intermediate_size": 0,
        "num_mtp_modules": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw | published))
    tokens = prompt(LENGTH)
    assert_close(ModelBench(tmp_path).run(tokens, [LENGTH]), checkpoint.logits(tokens))
    for field, value in {"attn_type_list": [1, 0, 1], "qk_norm_type": "per_head"}.items():
        (tmp_path / "config.json").write_text(json.dumps(raw | published | {field: value}))
        with pytest.raises(ConfigError, match=f"minimax_m2 with {field}="):
            ModelBench(tmp_path)


@pytest.mark.parametrize("name", WITH_PREDICTION_LAYERS)
def test_greedy_tokens_with_prediction_layers(
    name: str, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    size = len(byte_level_tokenizer)
    checkpoint = write_family(name, tmp_path, vocab_size=size, num_nextn_predict_layers=1)
    add_mtp_layers(tmp_path)
    byte_level_tokenizer.save_pretrained(tmp_path)
    prompts = [prompt(5), prompt(17)]
    engine = create_engine(tmp_path, method="mtp", num_speculative_tokens=2)
    assert generate(engine, GREEDY, prompts) == [greedy(checkpoint, ids) for ids in prompts]
    assert engine.engine.core.stats.spec_decode.num_drafts > 0


def greedy(checkpoint: Checkpoint, token_ids: list[int]) -> list[int]:
    tokens = list(token_ids)
    for _ in range(NEW_TOKENS):
        tokens.append(int(torch.argmax(checkpoint.logits(tokens)[-1])))
    return tokens[len(token_ids) :]
