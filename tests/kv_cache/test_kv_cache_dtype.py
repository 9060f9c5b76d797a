"""--kv-cache-dtype: another storage changes what is remembered and nothing about the engine."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import prompt
from one_thread import one_thread  # noqa: F401  # a fixture
from spec_decode import engines
from spec_decode.engines import Folders, create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.config import ConfigError
from atom.kv_cache.base import KVCachePlan
from atom.kv_cache.builders import attention_layers
from atom.model_engine import rank, worker
from atom.model_engine.arg_utils import (
    add_engine_flags,
    engine_config,
    engine_options,
)
from atom.model_engine.start_up import kv_memory
from atom.model_ops.attention.metadata import KVCacheTensor, LatentCacheTensor
from atom.model_ops.attention.mla import MLAAttention
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.mla import mla_attention
from atom.platform import cpu_platform

# (target, what drafts for it)
PAIRS = [("llama", "mha"), ("deepseek_v3", "mla"), ("deepseek_v3", "mtp")]
SHARED = prompt(21, seed=5)
PROMPTS = [[*SHARED[:n], *prompt(9, seed=n)] for n in (8, 16, 17, 20)] + [SHARED, SHARED[:12]]


FLAVOURS = ("e4m3fn", "e4m3fnuz")


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Which 8 bits a CPU's engines store."""
    if request.param == "e4m3fnuz":
        ours = dataclasses.replace(cpu_platform(), arch="gfx942")
        monkeypatch.setattr(rank, "select_platform", lambda _: ours)
        return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def cells(*pairs: tuple[str, str]) -> list[Any]:
    """All pairs in both kinds of 8 bits; torch computes long with the second, and so each commit
    takes the first pair in it.
    """
    return [
        pytest.param(name, *pair, marks=pytest.mark.slow if number and name == FLAVOURS[1] else ())
        for name in FLAVOURS
        for number, pair in enumerate(pairs)
    ]


def executor_of(engine: LLM) -> worker.Worker:
    found = engine.engine.core.executor
    assert isinstance(found, worker.Worker)
    return found


def caches(engine: LLM) -> list[KVCacheTensor | LatentCacheTensor]:
    """Of the target's layers, then of the draft's."""
    runner = executor_of(engine)
    models = [runner.parts.model, runner.parts.proposer.draft_model]
    layers = [a for m in models if m is not None for a in attention_layers(m).values()]
    return [layer.kv_cache for layer in layers]


def storage_of(cache: KVCacheTensor | LatentCacheTensor) -> torch.dtype:
    return cache.key.dtype if isinstance(cache, KVCacheTensor) else cache.latent.dtype


def has_scales(cache: KVCacheTensor | LatentCacheTensor) -> bool:
    if isinstance(cache, KVCacheTensor):
        return cache.key_scale is not None and cache.value_scale is not None
    return cache.scale is not None


@pytest.mark.parametrize(("flavour", "target", "method"), cells(*PAIRS), indirect=["flavour"])
def test_speculation_changes_no_token(
    target: str, method: str, flavour: torch.dtype, folders: Folders
) -> None:
    """Target and draft both store 8 bits, greedily and at a temperature with seeds."""
    plain = create_engine(folders(target), kv_cache_dtype="fp8")
    fast = create_engine(folders(target), kv_cache_dtype="fp8", **folders.speculation(method))
    assert len(caches(fast)) > len(caches(plain))
    assert {storage_of(cache) for cache in caches(fast)} == {flavour}
    assert all(has_scales(cache) for cache in caches(fast))
    for setting in ("greedy", "warm"):
        assert generate(fast, params(setting)) == generate(plain, params(setting)), setting
    stats = fast.engine.core.stats.spec_decode
    assert stats is not None
    assert stats.num_drafts > 0
    (builder,) = executor_of(fast).parts.proposer.kv_cache_builders
    owner = "mtp" if method == "mtp" else "eagle3"
    tensors = builder.allocate_kv_cache_tensors(1)
    assert list(tensors) == [f"{owner}_kv_cache", f"{owner}_kv_scale"]
    assert tensors[f"{owner}_kv_cache"].nbytes == builder.compute_block_bytes()


def test_native_kernels_read_latents_of_8_bits(
    tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast, folders: Folders
) -> None:
    """A latent of a size that they take; in bfloat16, where their bits decide."""
    if reason := native_build().reason:
        pytest.skip(reason)
    target = engines.write_target("deepseek_v3", tmp_path, byte_level_tokenizer, kv_lora_rank=32)
    options = {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    plain = create_engine(target, **options)
    for layer in attention_layers(executor_of(plain).parts.model).values():
        assert isinstance(layer, MLAAttention)
        assert layer._decode is layer._prefill is mla_attention
    fast = create_engine(target, **options, **folders.speculation("mtp"))
    for setting in ("greedy", "warm"):
        assert generate(fast, params(setting)) == generate(plain, params(setting)), setting


@pytest.mark.usefixtures("flavour")
@pytest.mark.parametrize(("flavour", "target", "method"), cells(*PAIRS[:2]), indirect=["flavour"])
def test_prefix_hits_and_preemption_change_no_token(
    target: str,
    method: str,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"kv_cache_dtype": "fp8", **folders.speculation(method)}
    sampling = params("warm", max_tokens=12)
    whole = create_engine(folders(target), enable_prefix_caching=False, **options)
    expected = generate(whole, sampling, PROMPTS)
    hitting = create_engine(folders(target), max_num_batched_tokens=16, **options)
    for _ in range(2):  # the second time every prefix is cached
        assert generate(hitting, sampling, PROMPTS) == expected
    assert hitting.engine.core.stats.prefix_cache_hits > 0
    # Room for two sequences at a time.
    monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(13, 0))
    tight = create_engine(folders(target), enable_prefix_caching=False, max_model_len=48, **options)
    assert generate(tight, sampling, PROMPTS) == expected
    assert tight.engine.core.stats.num_preemptions > 0


@pytest.mark.parametrize("target", ["llama", "deepseek_v3"])
def test_storage_and_size(target: str, folders: Folders, caplog: pytest.LogCaptureFixture) -> None:
    """As many bytes hold more tokens; logs, limits and the table of ops say what is stored."""
    blocks = {}
    for name, dtype in (
        ("auto", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp8", torch.float8_e4m3fn),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="atom"):
            engine = create_engine(
                folders(target),
                kv_cache_dtype=name,
                kv_cache_memory="100kB",
                max_model_len=16,
                max_num_seqs=512,
                max_num_batched_tokens=512,
            )
        stored = str(dtype).removeprefix("torch.")
        assert {storage_of(cache) for cache in caches(engine)} == {dtype}
        assert engine.engine.core.limits.kv_cache_dtype == stored
        assert engine.engine.core.stats.kv_cache_dtype == stored
        assert f"KV blocks of 4 tokens in {stored}," in caplog.text
        assert ("KV cache scales: the checkpoint's in 0 of" in caplog.text) == (name == "fp8")
        blocks[name] = engine.engine.core.limits.num_blocks
        if name == "bf16" and target == "llama":
            assert f"the cache holds {dtype}" in caplog.text
    assert 2 * blocks["auto"] <= blocks["bf16"] <= 2 * blocks["auto"] + 1
    assert 2 * blocks["bf16"] <= blocks["fp8"] <= 2 * blocks["bf16"] + 1


def test_the_model_computes_in_its_own_type(folders: Folders) -> None:
    """A bfloat16 cache of a float32 model stays close to a float32 one, and is not equal."""
    outputs = []
    for name in ("auto", "bf16"):
        engine = create_engine(folders("llama"), kv_cache_dtype=name)
        (output,) = engine.generate(
            [PROMPTS[0]], params("greedy", max_tokens=1, prompt_logprobs=0), use_tqdm=False
        )
        assert output.prompt_logprobs is not None
        rows = [next(iter(row.values())).logprob for row in output.prompt_logprobs if row]
        outputs.append(torch.tensor(rows))
    assert not torch.equal(*outputs)
    torch.testing.assert_close(*outputs, atol=0.1, rtol=0.05)


def test_flags_and_arguments() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    for flag in ("--kv-cache-dtype", "--kv_cache_dtype"):
        options = engine_options(parser.parse_args([flag, "fp8"]))
        assert engine_config(**options).cache.kv_cache_dtype == "fp8"
    assert engine_config().cache.kv_cache_dtype == "auto"
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, bf16, fp8; got"):
        engine_config(kv_cache_dtype="int8")


def test_an_override_that_cannot_be_honoured_fails(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_OP_KV_CACHE_WRITE", "native")
    with pytest.raises(RuntimeError, match="kv_cache_write"):
        create_engine(folders("llama"), kv_cache_dtype="bf16")
