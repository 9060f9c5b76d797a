"""Loading a draft: what it shares, what is checked against the target, what is refused."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from spec_decode.draft_bench import (
    DRAFT_VOCAB,
    HIDDEN,
    MHA,
    MLA,
    NUM_LAYERS,
    VOCAB,
    DraftBench,
    draft_tensors,
    load,
    write_draft,
)

from atom.config import ConfigError, ModelOptions
from atom.model_loader.drafts.eagle3 import load_draft
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.locate import embedded_model
from atom.model_loader.source import ModelSource, resolve_model
from atom.model_loader.weights import WeightError
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.models.eagle3.deepseek import Eagle3DeepseekV2ForCausalLM
from atom.models.eagle3.llama import LlamaForCausalLMEagle3
from atom.models.registry import create_model
from atom.platform import cpu_platform

Target = tuple[CausalLM, ModelSource]
FULL = {"draft_vocab_size": VOCAB}


def test_the_architecture_decides_the_class(tmp_path: Path, llama_target: Target) -> None:
    mha = load(write_draft(tmp_path / "mha", MHA, draft_tensors(MHA)), *llama_target)
    mla = load(write_draft(tmp_path / "mla", MLA, draft_tensors(MLA)), *llama_target)
    assert isinstance(mha, LlamaForCausalLMEagle3)
    assert isinstance(mla, Eagle3DeepseekV2ForCausalLM)


def test_shared_parts_stay_the_targets(tmp_path: Path, llama_target: Target) -> None:
    raw = {**MHA, **FULL}
    draft = load(write_draft(tmp_path, raw, draft_tensors(raw, head=False)), *llama_target)
    assert not any(name.startswith(("embed", "lm_head")) for name, _ in draft.named_parameters())
    shared = {id(p) for p in llama_target[0].parameters()}
    assert not shared & {id(p) for p in draft.parameters()}


def test_convention_and_ids_are_logged(
    tmp_path: Path, llama_target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = draft_tensors(MHA)
    cases = {
        "[2, 4, 5] of eagle_aux_hidden_state_layer_ids read as boundary ids": (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}},
            "2, 4, 5",
        ),
        "[1, 3, 6] of eagle_aux_hidden_state_layer_ids read as output ids": (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}},
            "2, 4, 7",
        ),
        "[2, 4, 5] of target_layer_ids read as output ids": (
            {"dflash_config": {"target_layer_ids": [2, 4, 5], "mask_token_id": 9}},
            "3, 5, 6",
        ),
        "[1, 3, 6] of aux_hidden_state_layer_ids read as boundary ids": (
            {"aux_hidden_state_layer_ids": [1, 3, 6]},
            "1, 3, 6",
        ),
        "none given, the target's default": ({}, "2, 4, 5"),
    }
    for i, (words, (fields, resolved)) in enumerate(cases.items()):
        raw = {**MHA, "eagle_config": {}, **fields}
        caplog.clear()
        with caplog.at_level(logging.INFO, "atom"):
            draft = load(write_draft(tmp_path / str(i), raw, tensors), *llama_target)
        assert draft.aux_layer_ids == tuple(int(n) for n in resolved.split(", "))
        assert words in caplog.text
        assert f"what enters layers {resolved} of {NUM_LAYERS}" in caplog.text
        assert f"own head over {DRAFT_VOCAB} of {VOCAB} tokens" in caplog.text


def test_the_user_says_what_ids_name(tmp_path: Path, llama_target: Target) -> None:
    folder = str(write_draft(tmp_path / "ids", MHA, draft_tensors(MHA)))
    context = LayerContext.create(torch.float32, 128, cpu_platform())
    draft = load_draft(folder, DraftTarget(*llama_target, context, ModelOptions(), "output"))
    assert draft.aux_layer_ids == (3, 5, 6)
    without = {**MHA, "eagle_config": {}}
    folder = str(write_draft(tmp_path / "none", without, draft_tensors(MHA)))
    with pytest.raises(ConfigError, match="draft_aux_layer_convention has no effect"):
        load_draft(folder, DraftTarget(*llama_target, context, ModelOptions(), "output"))


def test_unknown_keys_and_short_drafts_are_warned_about(
    tmp_path: Path, llama_target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    raw = {**MHA, "training_steps": 7, "max_position_embeddings": 64}
    with caplog.at_level(logging.WARNING, "atom"):
        load(write_draft(tmp_path, raw, draft_tensors(raw)), *llama_target)
    assert "training_steps" in caplog.text
    assert "made for 64 positions and the context is 128" in caplog.text


def _drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _set(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


def _keep(_: dict[str, torch.Tensor]) -> None:
    pass


Refusal = tuple[dict[str, Any], Callable[[dict[str, torch.Tensor]], None], list[str]]

REFUSED: dict[str, Refusal] = {
    "another target": (
        {"target_hidden_size": 64},
        _keep,
        ["target_hidden_size is 64", f"hidden_size is {HIDDEN}"],
    ),
    "another vocabulary": ({"vocab_size": 97}, _keep, ["97", "96"]),
    "aux ids out of range": (
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
        _keep,
        ["[2, 4, 9]", "0..8", "8 layers"],
    ),
    "output ids out of range": (
        {"target_layer_ids": [2, 4, 8], "eagle_config": {}},
        _keep,
        ["[2, 4, 8]", "output", "-1..7"],
    ),
    "aux ids twice": ({"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}, _keep, ["[2, 2, 4]"]),
    "fan-in": (
        {},
        _set("fc.weight", torch.zeros(HIDDEN, 2 * HIDDEN)),
        ["[32, 64]", "[32, 96]", "3 hidden states of 32", "96 inputs"],
    ),
    "fan-in by the number of ids": (
        {"eagle_aux_hidden_state_layer_ids": [2, 4]},
        _set("fc.weight", torch.zeros(HIDDEN, 3 * HIDDEN)),
        ["[32, 96]", "[32, 64]", "2 hidden states of 32"],
    ),
    "pruned and no head": ({}, _drop("lm_head.weight"), [f"{DRAFT_VOCAB} (draft", f"has {VOCAB}"]),
    "pruned and no map": ({}, _drop("d2t"), [f"{DRAFT_VOCAB} of {VOCAB}", "d2t"]),
    "absolute ids": (
        {},
        _set("d2t", torch.arange(VOCAB - DRAFT_VOCAB, VOCAB)),
        ["56 to 134", "0..95", "offsets"],
    ),
    "negative offsets": (
        {},
        _set("d2t", torch.full((DRAFT_VOCAB,), -1)),
        ["-1 to 38", "0..95"],
    ),
    "tokens twice": (
        {},
        _set("d2t", -torch.arange(DRAFT_VOCAB) + 3),
        [f"{DRAFT_VOCAB} draft tokens to only 1"],
    ),
    "narrow draft without an embedding": (
        {"hidden_size": 16, "target_hidden_size": HIDDEN},
        _set("fc.weight", torch.zeros(16, 3 * HIDDEN)),
        ["no embed_tokens", "16 wide", "32 wide"],
    ),
    "tied to its own embedding": (
        {"tie_word_embeddings": True, "draft_vocab_size": VOCAB},
        lambda tensors: (
            tensors.pop("lm_head.weight"),
            tensors.update({"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}),
        ),
        ["tie_word_embeddings", "embed_tokens", "lm_head"],
    ),
    "another architecture": (
        {"architectures": ["Qwen3ForCausalLM"]},
        _keep,
        ["Qwen3ForCausalLM", "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path, llama_target: Target) -> None:
    changes, spoil, words = REFUSED[name]
    tensors = draft_tensors(MHA)
    spoil(tensors)
    with pytest.raises(ConfigError) as raised:
        load(write_draft(tmp_path, {**MHA, **changes}, tensors), *llama_target)
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_drop("midlayer.hidden_norm.weight"), ["missing", "midlayer.hidden_norm.weight"]),
        (_drop("midlayer.self_attn.k_proj.weight"), ["missing", "qkv_proj", "k_proj"]),
        (_set("input_norm.weight", torch.zeros(96)), ["unexpected", "input_norm.weight"]),
        (_set("fc_norm.0.weight", torch.zeros(32)), ["unexpected", "fc_norm.0.weight"]),
        (
            _set("layers.1.mlp.up_proj.weight", torch.zeros(48, 32)),
            ["unexpected", "layers.1.mlp.up_proj.weight"],
        ),
        (_set("fc.bias", torch.zeros(32)), ["unexpected", "fc.bias"]),
        (
            _set("midlayer.self_attn.o_proj.weight", torch.zeros(32, 64)),
            ["midlayer.self_attn.o_proj.weight", "[32, 64]", "[32, 32]"],
        ),
        (_set("lm_head.weight", torch.zeros(39, 32)), ["lm_head.weight", "39", "40"]),
        (_set("d2t", torch.zeros(39, dtype=torch.int64)), ["d2t", "[39]", "[40]"]),
        (_set("d2t", torch.zeros(DRAFT_VOCAB)), ["d2t", "float32", "int64"]),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    spoil: Callable[[dict[str, torch.Tensor]], None],
    words: list[str],
    tmp_path: Path,
    llama_target: Target,
) -> None:
    tensors = draft_tensors(MHA)
    spoil(tensors)
    with pytest.raises(WeightError) as raised:
        load(write_draft(tmp_path, MHA, tensors), *llama_target)
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 0}, r"config\.json: head_dim should be a positive integer, got 0"),
        ({"head_dim": 10**9}, r"config\.json: head_dim=1000000000 is more than the 16384"),
        ({"head_dim": 16384}, r"q_proj\.weight \[32, 64\]: .* wants \[65536, 64\]"),
        ({"intermediate_size": 1 << 20}, r"up_proj\.weight \[48, 32\]: .* wants \[1048576, 32\]"),
    ],
)
def test_sizes_that_lie(
    changes: dict[str, Any], message: str, tmp_path: Path, llama_target: Target
) -> None:
    folder = write_draft(tmp_path, {**MHA, **changes}, draft_tensors(MHA))
    with pytest.raises((ConfigError, WeightError), match=message):
        load(folder, *llama_target)


def test_drafts_larger_than_the_memory(tmp_path: Path, llama_target: Target) -> None:
    raw = {**MHA, "num_attention_heads": 1 << 14, "head_dim": 1 << 14, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    context = LayerContext.create(torch.float32, 128, cpu_platform())
    with pytest.raises(ConfigError, match=r"describes a model whose parameters take \d+\.\d GB"):
        load_draft(
            str(tmp_path), DraftTarget(*llama_target, context, ModelOptions(load_format="dummy"))
        )


def test_draft_weights_that_are_no_numbers(tmp_path: Path, llama_target: Target) -> None:
    tensors = draft_tensors(MHA)
    tensors["midlayer.hidden_norm.weight"][:] = float("nan")
    with pytest.raises(
        WeightError, match=r"midlayer\.hidden_norm\.weight: 32 of 32 values are NaN"
    ):
        load(write_draft(tmp_path, MHA, tensors), *llama_target)


def test_places_without_a_draft(tmp_path: Path, llama_target: Target) -> None:
    with pytest.raises(ConfigError, match=r"no draft folder .*nowhere"):
        load(tmp_path / "nowhere", *llama_target)
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load(tmp_path, *llama_target)
    (tmp_path / "config.json").write_text(json.dumps(MHA), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is a file; expected a folder or a hub id"):
        load(tmp_path / "config.json", *llama_target)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors files"):
        load(tmp_path, *llama_target)


def _tokenizer(path: Path, vocab: Any, added: list[dict[str, Any]]) -> None:
    path.mkdir(exist_ok=True)
    content = {"model": {"vocab": vocab}, "added_tokens": added}
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def test_another_tokenizer_is_refused(tmp_path: Path, llama_target: Target) -> None:
    target, source = llama_target
    folder = write_draft(tmp_path / "draft", MHA, draft_tensors(MHA))
    source = replace(source, path=tmp_path / "target")
    eos = [{"id": 3, "content": "<eos>"}]
    _tokenizer(source.path, {"a": 0, "b": 1, "c": 2}, eos)
    load(folder, target, source)
    _tokenizer(folder, [["a", 0.0], ["b", 0.0], ["c", 0.0]], eos)
    load(folder, target, source)
    _tokenizer(folder, {"a": 0, "c": 1, "b": 2}, eos)
    with pytest.raises(
        ConfigError, match=r"4 tokens.*2 ids mean something else, such as 1: 'c'.*'b'"
    ):
        load(folder, target, source)
    _tokenizer(folder, {"a": 0, "b": 1, "c": 2}, [{"id": 3, "content": "</s>"}])
    with pytest.raises(ConfigError, match=r"1 ids .* such as 3: '</s>' .* '<eos>'"):
        load(folder, target, source)


def test_another_tokenizer_file_is_refused(tmp_path: Path, llama_target: Target) -> None:
    target, source = llama_target
    folder = write_draft(tmp_path / "draft", MHA, draft_tensors(MHA))
    source = replace(source, path=tmp_path / "target")
    source.path.mkdir()
    for path in (folder, source.path):
        (path / "tiktoken.model").write_bytes(b"YQ== 0\n")
    load(folder, target, source)
    (folder / "tiktoken.model").write_bytes(b"YQ== 0\nYg== 1\n")
    with pytest.raises(ConfigError, match=r"\(14 bytes\) and .* \(7 bytes\) differ"):
        load(folder, target, source)


@pytest.mark.parametrize("raw", [MHA, MLA, {**MHA, **FULL}], ids=["mha", "mla", "full"])
def test_dummy_weights_need_a_config_only(
    raw: dict[str, Any], tmp_path: Path, llama_target: Target
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    context = LayerContext.create(torch.float32, 128, cpu_platform())
    options = ModelOptions(load_format="dummy")
    draft = load_draft(str(tmp_path), DraftTarget(*llama_target, context, options))
    drafts, states = DraftBench(draft).propose("s", 0, [1, 2, 3], torch.randn(3, HIDDEN), 3)
    assert len(drafts) == 3
    assert bool(states.isfinite().all())


@pytest.mark.skipif(
    "ATOM_TEST_EAGLE3_DRAFT" not in os.environ,
    reason="ATOM_TEST_EAGLE3_DRAFT names no draft for the embedded model",
)
def test_a_published_style_draft_of_the_embedded_model() -> None:
    """Parses, and every tensor arrives where it belongs."""
    embedded_model()
    folder = Path(os.environ["ATOM_TEST_EAGLE3_DRAFT"])
    source = resolve_model(ModelOptions())
    context = LayerContext.create(torch.bfloat16, 256, cpu_platform())
    target = create_model(source.hf_config, context)
    draft = load_draft(str(folder), DraftTarget(target, source, context, ModelOptions()))
    tensors = load_file(folder / "model.safetensors")
    layer, parameters = draft.midlayer, dict(draft.named_parameters())
    qkv = [tensors[f"midlayer.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(qkv))
    gate_up = [tensors[f"midlayer.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(gate_up))
    for name in set(tensors) & set(parameters):
        assert torch.equal(parameters[name], tensors[name])
    loaded = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size))
    assert torch.equal(loaded, tensors["t2d"].nonzero()[:, 0])
    assert draft.aux_layer_ids == (2, 15, 27)
