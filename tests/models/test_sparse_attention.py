"""DeepSeek-V3.2 and GLM-5 in contexts of more tokens than their indexers choose."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import Checkpoint, edit_config, prompt
from models.families import write_family
from models.harness import ModelBench
from ranks import engines_of_threads, run_ranks
from safetensors.torch import load_file, save_file
from spec_decode import engines
from spec_decode.mtp_reference import SharedChoiceMTP, add_mtp_layers
from spec_decode.test_mtp import load as load_mtp_layers
from transformers import PreTrainedTokenizerFast as Tokenizer

from atom.config import ConfigError
from atom.kv_cache.base import KVCachePlan
from atom.kv_cache.builders import attention_layers
from atom.kv_cache.paged import PagedCache
from atom.model_engine.start_up import kv_memory
from atom.model_ops.attention.metadata import ModelInput, ModelOutput
from atom.model_ops.attention.sparse import Indexer
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.program import Arena, record
from atom.model_ops.kernels.torch import index_topk as torch_index
from atom.model_ops.kernels.torch import mla as torch_mla

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
# 12 are chosen.
LENGTH = 45
TOLERANCE = 1e-4
NATIVE = pytest.mark.skipif(native_build().reason is not None, reason="needs the native kernels")
# Sizes that the C++ kernels take.
SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 32, "v_head_dim": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    return cache(lambda name: write_family(name, tmp_path_factory.mktemp(name), **SIZES))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, atol=TOLERANCE, rtol=0)


def by_torch(patch: pytest.MonkeyPatch) -> None:
    for op in ("INDEX_TOPK", "INDEX_CACHE_WRITE", "MLA_SPARSE"):
        patch.setenv(f"ATOM_OP_{op}", "torch")


@NATIVE
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_are_the_same_in_chunks_of_any_size(
    name: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    bench, tokens = ModelBench(checkpoint(name).folder, num_blocks=900), prompt(LENGTH)
    whole = bench.run(tokens, [LENGTH], "whole")
    assert close(whole, checkpoint(name).logits(tokens))
    for first in range(1, LENGTH):
        assert torch.equal(bench.run(tokens, [first, LENGTH], f"cut at {first}"), whole)
    assert torch.equal(bench.run(tokens, [1], "token by token"), whole)


@NATIVE
@pytest.mark.parametrize("name", FAMILIES)
def test_verification_has_the_bits_of_single_steps(
    name: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """Of k + 1 tokens beside other sequences, after drafts that were rejected."""
    bench, tokens = ModelBench(checkpoint(name).folder, num_blocks=200), prompt(LENGTH)
    single = bench.run(tokens, [10, 1], "single")
    other = prompt(30, seed=4)
    bench.step({"verified": tokens[:10], "other": other[:3]})
    for start in range(10, LENGTH - 8, 3):
        wrong = [*tokens[start : start + 3], *prompt(5, seed=start)]
        found = bench.step({"other": other[3:4], "verified": wrong})["verified"]
        assert torch.equal(found[:3], single[start : start + 3])
        bench.rewind("verified", start + 3)


@NATIVE
@pytest.mark.parametrize("name", FAMILIES)
def test_short_contexts_have_the_bits_of_attention_to_all(
    name: str, checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, tokens = ModelBench(checkpoint(name).folder), prompt(LENGTH)
    sparse = bench.run(tokens, [9, 1], "sparse")
    indexers = [m for m in bench.model.modules() if isinstance(m, Indexer)]
    for indexer in indexers:
        monkeypatch.setattr(indexer, "_may_be_dense", True)
    assert torch.equal(bench.run(tokens[:12], [9, 1], "dense"), sparse[:12])
    # Keys were written there, too.
    assert torch.equal(bench.run(tokens[12:], [1], "dense"), sparse[12:])


@pytest.mark.parametrize("name", FAMILIES)
def test_ops_of_torch_compute_the_same(
    name: str, checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_torch(monkeypatch)
    bench, tokens = ModelBench(checkpoint(name).folder), prompt(LENGTH)
    expected = checkpoint(name).logits(tokens)
    assert close(bench.run(tokens, [LENGTH], "whole"), expected)
    assert close(bench.run(tokens, [17, 4, 1], "chunked"), expected)


@pytest.mark.parametrize(("name", "size"), [*itertools.product(FAMILIES, (2, 4))])
def test_ranks_choose_the_same(
    name: str, size: int, checkpoint: Callable[[str], Checkpoint]
) -> None:
    tokens = prompt(LENGTH)
    folder = checkpoint(name).folder
    found = run_ranks(size, lambda group: ModelBench(folder, group=group).run(tokens, [30, 3]))
    assert close(found[0], checkpoint(name).logits(tokens))


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_that_hold_whole_experts(
    name: str, tmp_path: Path, byte_level_tokenizer: Tokenizer
) -> None:
    folder = engines.write_target(name, tmp_path, byte_level_tokenizer, **SIZES)
    sampling, prompts = engines.params("greedy", max_tokens=6), [prompt(25), prompt(9, seed=1)]
    expected = engines.generate(engines.create_engine(folder), sampling, prompts)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with engines_of_threads(), engines.create_engine(folder, **options) as engine:
        assert engines.generate(engine, sampling, prompts) == expected


@NATIVE
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_one_program(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    """Nothing in it is an operation of torch; replays follow the lengths of contexts."""
    bench, tokens = ModelBench(checkpoint(name).folder), prompt(LENGTH)
    seen: list[ModelInput] = []

    def forward(model_input: ModelInput) -> ModelOutput:
        seen.append(model_input)
        return bench.model.forward(model_input)

    bench.run_with(forward)
    bench.step({"a": tokens[:11], "b": tokens[:30]})
    expected = torch.cat([*bench.step({"a": tokens[11:12], "b": tokens[30:31]}).values()])
    with torch.inference_mode():
        result, program = record(
            lambda: bench.model.forward(seen[-1]), lambda out: [out.hidden_states], Arena()
        )
        program.replay()
    assert torch.equal(bench.model.compute_logits(result.hidden_states), expected)


def write_nothing(*_: object) -> None:
    pass


def last_of_equals(scores: torch.Tensor, seen: torch.Tensor, topk: int) -> torch.Tensor:
    width = scores.shape[1]
    backwards = torch.where(
        torch.arange(width) < seen[:, None], scores, torch.tensor(float("-inf"))
    ).flip(-1)
    found = width - 1 - backwards.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    return found.masked_fill(found >= seen[:, None], width).sort(-1).values


@NATIVE
@pytest.mark.parametrize("fault", ["none", "the last of equals", "keys that are not written"])
def test_planted_faults_are_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one head of the indexer half of all scores are 0; kernels choose the same of them."""
    write_family("deepseek_v32", tmp_path, **SIZES, index_n_heads=1)
    tokens = prompt(LENGTH)
    expected = ModelBench(tmp_path).run(tokens, [LENGTH])
    by_torch(monkeypatch)
    if fault == "the last of equals":
        monkeypatch.setattr(torch_index, "choose", last_of_equals)
    if fault == "keys that are not written":
        monkeypatch.setattr(torch_mla, "mla_cache_write", write_nothing)
        monkeypatch.setenv("ATOM_OP_MLA_CACHE_WRITE", "native")
    assert close(ModelBench(tmp_path).run(tokens, [20, 5]), expected) == (fault == "none")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return engines.write_target("glm_moe_dsa", folder, byte_level_tokenizer, **SIZES)


@pytest.mark.parametrize(
    ("how", "method", "overlap"),
    [
        ("recorded", "mtp", False),
        ("recorded", "mtp", True),
        ("recorded", "suffix", True),
        ("op by op", "mtp", True),
        ("by torch", "mtp", False),
        ("8 bits", "mtp", False),
        ("preempted", "mtp", True),
        ("preempted", "suffix", False),
    ],
)
def test_drafts_change_no_token(
    target: Path, how: str, method: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In contexts of up to five times as many tokens as are chosen."""
    options: dict[str, Any] = {"overlap": overlap, "max_num_batched_tokens": 32}
    if how == "op by op":
        options["enforce_eager"] = True
    if how == "by torch":
        by_torch(monkeypatch)
    if how == "8 bits":
        options["kv_cache_dtype"] = "fp8"
    prompts, sampling = engines.PROMPTS[4:12], engines.params("top-p", max_tokens=16)
    expected = engines.generate(engines.create_engine(target, **options), sampling, prompts)
    if how == "preempted":
        monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(34, 0))
    drafting = engines.create_engine(target, method=method, num_speculative_tokens=3, **options)
    assert engines.generate(drafting, sampling, prompts) == expected
    stats = drafting.engine.core.stats  # type: ignore[attr-defined]
    assert stats.spec_decode.num_drafts > 0
    assert (stats.num_preemptions > 0) == (how == "preempted")


def test_keys_have_the_models_dtype_in_a_cache_of_8_bits(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    model = ModelBench(checkpoint("glm_moe_dsa").folder).model
    cache_of = PagedCache(attention_layers(model), 4, torch.float8_e4m3fn, torch.device("cpu"))
    tensors = cache_of.allocate_kv_cache_tensors(2)
    assert tensors["kv_cache"].dtype is torch.float8_e4m3fn
    # Two of three layers have keys, without scales.
    keys = tensors["kv_cache_2"]
    assert (keys.shape, keys.dtype) == ((2, 2, 4, 16), torch.float32)
    assert "kv_scale_2" not in tensors
    assert cache_of.compute_block_bytes() == 4 * (3 * 40 + 2 * 16 * 4)


def test_indexers_of_layers_that_share_a_choice_are_not_read(tmp_path: Path) -> None:
    checkpoint = write_family("glm_moe_dsa", tmp_path, **SIZES)
    file, tokens = tmp_path / "model.safetensors", prompt(LENGTH)
    tensors = load_file(file)
    first, second = "model.layers.0.self_attn.indexer", "model.layers.1.self_attn.indexer"
    tensors |= {
        name.replace(first, second): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(first)
    }
    save_file(tensors, file, metadata={"format": "pt"})
    assert close(ModelBench(tmp_path).run(tokens, [LENGTH]), checkpoint.logits(tokens))


def test_drafts_of_an_engine_attend_to_what_the_first_one_chose(
    tmp_path: Path, byte_level_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Op by op, and in chains of recorded steps: the drafts of both are the reference's."""
    fields = {**SIZES, "index_share_for_mtp_iteration": True}
    checkpoint = engines.write_checkpoint("glm_moe_dsa", tmp_path, byte_level_tokenizer, **fields)
    reference = SharedChoiceMTP(tmp_path)
    sampling, prompts = engines.params("greedy", max_tokens=10), [prompt(25), prompt(31, seed=1)]
    expected = engines.generate(engines.create_engine(tmp_path), sampling, prompts)
    options = {"method": "mtp", "num_speculative_tokens": 3, "speculative_adaptive": False}
    for eager in (True, False):
        with engines.drafts_recorded(monkeypatch) as recorded:
            engine = engines.create_engine(tmp_path, enforce_eager=eager, **options)
            assert engines.generate(engine, sampling, prompts) == expected
        (made,) = recorded
        assert len(made) > 10
        for text, drafts in [*made.items()][:: len(made) // 5]:
            hidden = checkpoint.hidden_states([*text[:-1]])[-1]
            assert drafts == reference.propose([*text[1:]], hidden, len(drafts))[0]


def test_a_choice_is_shared_by_the_drafts_of_one_layer(tmp_path: Path) -> None:
    fields = {"num_nextn_predict_layers": 2, "index_share_for_mtp_iteration": True}
    write_family("glm_moe_dsa", tmp_path, **{**SIZES, **fields})
    add_mtp_layers(tmp_path)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=2 is not supported"):
        load_mtp_layers(tmp_path)


def test_kinds_of_indexers_that_are_unknown_are_refused(tmp_path: Path) -> None:
    write_family("glm_moe_dsa", tmp_path, **SIZES)
    for kinds, told in (
        (["full", "half", "full"], "says 'half' of layer 1"),
        (["shared", "full", "full"], "says 'shared' of layer 0"),
        (["full"], "an entry for each of num_hidden_layers=3"),
    ):
        edit_config(tmp_path, indexer_types=kinds)
        with pytest.raises(ConfigError, match=told):
            ModelBench(tmp_path)
    edit_config(tmp_path, indexer_types=None, index_head_dim=4)
    with pytest.raises(ConfigError, match="index_head_dim=4: it should be at least"):
        ModelBench(tmp_path)
