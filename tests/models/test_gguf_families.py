"""GGUF files of every architecture of the table: the logits of the checkpoint they were made of.

They are written with llama.cpp's own names of tensors and keys, rows in the order of its converter.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    get_tensor_name_map,
)
from gguf.quants import quantize
from models import checkpoints, transformers_families
from models.checkpoints import Checkpoint, prompt
from models.families import FAMILIES, write_family
from models.harness import ModelBench, load_model
from models.hybrids import HYBRIDS, add_prediction_layer, write_hybrid
from safetensors.torch import load_file
from spec_decode.mtp_reference import add_mtp_layers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from atom.config import ConfigError, ModelOptions
from atom.environment import cache_dir
from atom.model_loader.checkpoint import list_tensors
from atom.model_loader.drafts.mtp import load_mtp
from atom.model_loader.errors import WeightError
from atom.model_loader.gguf.architectures import ARCHITECTURES
from atom.model_loader.gguf.file import read_gguf
from atom.model_loader.mapped_weights import map_parameters
from atom.model_loader.placement import find_targets, place_tensors
from atom.model_loader.safetensors.reader import WeightFile
from atom.model_loader.source import resolve_model
from atom.model_ops.layer_context import LayerContext
from atom.models.registry import create_model
from atom.platform import cpu_platform

# What llama.cpp's converter permutes: queries and keys of Llama and of what its class inherits.
_PERMUTED = ("llama", "mixtral", "smollm3", "granite", "mistral", "ministral3")
_FILES = {
    "llama": "llama",
    "mixtral": "llama",
    "mistral": "mistral3",
    "ministral3": "mistral3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "granite": "granite",
    "phi3": "phi3",
    "phi3-longrope": "phi3",
    "cohere": "command-r",
    "cohere-norms": "command-r",
    "cohere2": "cohere2",
    "glm4": "glm4",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "glm4_moe-norms": "glm4moe",
    "minimax_m2": "minimax-m2",
    "gpt_oss": "gpt-oss",
    "glm4_moe_lite": "deepseek2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm_moe_dsa": "glm-dsa",
    "qwen3_next": "qwen3next",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
}
# Files of other families with the maths of a native one: the family, and the file's name.
_SAME_MATHS = {
    "ernie4_5": "ernie4_5",
    "seed_oss": "seed_oss",
    "dots1": "dots1",
    # Transformers has none of these; their converters write what Llama's would.
    "llama-internlm2": "internlm2",
    "llama-exaone": "exaone",
    "granite-minicpm": "minicpm",
    # Texts of models that see.
    "qwen2-vl": "qwen2vl",
    "qwen3-vl": "qwen3vl",
    "qwen3_moe-vl": "qwen3vlmoe",
}
# What files do not say, llama.cpp knows.
_IMPLIED: dict[str, dict[str, Any]] = {
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_moe-vl": {"norm_topk_prob": True},
    "granite-minicpm": {"attention_multiplier": 12**-0.5},
    "cohere": {"tie_word_embeddings": True},
    "cohere-norms": {"tie_word_embeddings": True},
    "cohere2": {"num_hidden_layers": 4, "layer_types": None},
    "gpt_oss": {"swiglu_limit": 7.0},
    "gemma2": {"num_hidden_layers": 4, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 16},
}
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "logit_scale": "logit_scale",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_DELTA_KEYS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
# Of models with shared experts and groups of experts.
_ROUTED_KEYS = {
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one but for the compiled kernels."""
    compiled, folder = cache_dir() / "native", tmp_path / "cache"
    compiled.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    (folder / "native").symlink_to(compiled)
    monkeypatch.setenv("ATOM_CACHE", str(folder))


def test_every_name_of_the_table_is_tested() -> None:
    elsewhere = {"kimi-linear", "bert"}  # the latter by `tests/pooling/test_gguf_embedders.py`
    assert {*_FILES.values(), *_SAME_MATHS.values(), *elsewhere} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", [*_FILES, *_SAME_MATHS])
def test_logits_are_those_of_the_checkpoint(
    name: str, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = tmp_path / "checkpoint"
    checkpoint = write(name, folder, **_IMPLIED.get(name, {}))
    byte_level_tokenizer.save_pretrained(folder)
    path = write_file(tmp_path / "model.gguf", {**_FILES, **_SAME_MATHS}[name], checkpoint)
    tokens = prompt(24)
    bench = ModelBench(path, tokenizer=str(folder))
    found = bench.run(tokens, [16, 1])
    torch.testing.assert_close(found, checkpoint.logits(tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0])
def test_latent_attention_of_older_files_and_with_yarn(
    kind: GGMLQuantizationType, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 32}
    sizes |= {"v_head_dim": 16, "qk_nope_head_dim": 32}
    checkpoint = write("deepseek_v3", tmp_path / "checkpoint", rope_parameters=_YARN, **sizes)
    byte_level_tokenizer.save_pretrained(checkpoint.folder)
    tokens, found = prompt(40), []
    for splits_up in (False, True):
        path = tmp_path / f"{splits_up}.gguf"
        write_file(path, "deepseek2", checkpoint, kind, splits_up=splits_up)
        bench = ModelBench(path, tokenizer=str(checkpoint.folder), quantization="none")
        found.append(bench.run(tokens, [40]))
    if kind == GGMLQuantizationType.F32:
        torch.testing.assert_close(found[0], checkpoint.logits(tokens), atol=1e-4, rtol=0)
        torch.testing.assert_close(*found, atol=1e-4, rtol=0)
    # Keys' parts are quantised along other rows.
    assert (found[0] - found[1]).abs().median() < 0.1


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0])
def test_prediction_layers(
    kind: GGMLQuantizationType, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    """They are loaded, and draft what those of the checkpoint do."""
    folder, sizes = tmp_path / "checkpoint", {"hidden_size": 64, "moe_intermediate_size": 32}
    checkpoint = write_family("glm4_moe", folder, num_nextn_predict_layers=1, **sizes)
    added = {
        name: tensor
        for name, tensor in add_mtp_layers(folder).items()
        if name.startswith("model.layers.3.")
    }
    byte_level_tokenizer.save_pretrained(folder)
    path = write_file(tmp_path / "model.gguf", "glm4moe", checkpoint, kind, added)
    context = LayerContext.create(torch.float32, 64, cpu_platform())
    networks = []
    for model in (path, folder):
        options = ModelOptions(str(model), tokenizer=str(folder), dtype="float32")
        target = load_model(model, 64, tokenizer=str(folder))
        networks.append(load_mtp(target, resolve_model(options), context, options))
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    ours, theirs = (network.model["layers"]["3"] for network in networks)
    torch.testing.assert_close(ours.eh_proj.weight, theirs.eh_proj.weight, atol=0.02, rtol=0)
    outputs = [layer.mlp(rows) for layer in (ours, theirs)]
    if kind == GGMLQuantizationType.F32:
        torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
    assert (outputs[0] - outputs[1]).abs().median() < 0.05


def test_kimi_linear(tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    """Its names are those of published checkpoints; layers without keys have 0 heads of them."""
    checkpoint = write_hybrid("kimi_linear", tmp_path / "checkpoint")
    byte_level_tokenizer.save_pretrained(checkpoint.folder)
    path = write_kimi_linear(tmp_path / "model.gguf", checkpoint)
    tokens = prompt(24)
    found = ModelBench(path, tokenizer=str(checkpoint.folder)).run(tokens, [16, 1])
    torch.testing.assert_close(found, checkpoint.logits(tokens), atol=1e-4, rtol=0)


def write_kimi_linear(path: Path, checkpoint: Checkpoint) -> Path:
    config, name = checkpoint.reference.config, "kimi-linear"
    writer = GGUFWriter(path, name)
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "rope.dimension_count": config.qk_rope_head_dim,
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "vocab_size": config.vocab_size,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"{name}.{key}", value)
    for key, value in latent_keys(config, splits_up=True).items():
        writer.add_uint32(f"{name}.attention.{key}", value)
    writer.add_array(f"{name}.attention.head_count_kv", [0, 1, 0])
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{name}.expert_weights_scale", config.routed_scaling_factor)
    names = get_tensor_name_map(MODEL_ARCH.KIMI_LINEAR, config.num_hidden_layers)
    tensors = load_file(checkpoint.folder / "model.safetensors")
    for module, tensor in stacked_experts(tensors).items():
        for piece, each in pieces_of_kimi(module, tensor.float().numpy(), config).items():
            stored = names.get_name(piece, try_suffixes=(".weight", ".bias"))
            assert stored is not None, piece
            writer.add_tensor(stored, np.ascontiguousarray(each))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pieces_of_kimi(
    module: str, values: np.ndarray, config: PretrainedConfig
) -> dict[str, np.ndarray]:
    """As llama.cpp's converter has it."""
    if module.endswith("_conv1d.weight"):
        return {module: values.reshape(1, len(values), 1, -1)}
    if module.endswith("A_log"):
        return {module: -np.exp(values)}
    if module.endswith("dt_bias"):
        return {module.replace("dt_bias", "dt_proj.bias"): values}
    if module.endswith("correction_bias"):
        return {module.replace("correction_bias", "correction.bias"): values}
    if module.endswith("kv_b_proj.weight"):
        by_head = values.reshape(config.num_attention_heads, -1, values.shape[1])
        size = config.qk_nope_head_dim
        return {
            module.replace("kv_b_proj", "k_b_proj"): by_head[:, :size].swapaxes(1, 2),
            module.replace("kv_b_proj", "v_b_proj"): by_head[:, size:],
        }
    for stored, usual in {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.items():
        module = module.replace(f"experts.{stored}.", f"experts.{usual}.")
    return {module.replace("block_sparse_moe", "mlp"): values}


def test_a_prediction_layer_beside_states(
    tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    """That of Qwen3.5, which is a layer behind the last in files."""
    folder = tmp_path / "checkpoint"
    checkpoint = write_hybrid("qwen3_5", folder)
    added = {mtp_name(name, 3): t for name, t in add_prediction_layer(checkpoint).items()}
    byte_level_tokenizer.save_pretrained(folder)
    path = write_file(tmp_path / "model.gguf", "qwen35", checkpoint, prediction=added)
    context = LayerContext.create(torch.float32, 64, cpu_platform())
    networks = []
    for model in (path, folder):
        options = ModelOptions(str(model), tokenizer=str(folder), dtype="float32")
        target = load_model(model, 64, tokenizer=str(folder))
        networks.append(load_mtp(target, resolve_model(options), context, options))
    ours, theirs = (dict(network.named_parameters()) for network in networks)
    assert set(ours) == set(theirs)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], atol=1e-6, rtol=1e-6)


def mtp_name(name: str, layer: int) -> str:
    """What llama.cpp's converter makes of the name of Qwen's prediction layer."""
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    part = name.removeprefix("mtp.").removeprefix("layers.0.")
    stem, _, suffix = part.rpartition(".")
    if name.startswith("mtp.layers."):
        return f"model.layers.{layer}.{part}"
    return f"blk.{layer}.nextn.{names.get(stem, 'shared_head_norm')}.{suffix}"


def test_another_choice_of_experts_is_refused(tmp_path: Path) -> None:
    checkpoint = write_family("minimax_m2", tmp_path / "checkpoint")
    path = write_file(tmp_path / "model.gguf", "minimax-m2", checkpoint, gating=1)
    with pytest.raises(ConfigError, match="minimax-m2 with expert_gating_func is not supported"):
        resolve_model(ModelOptions(str(path)))


def test_a_granite_without_rotations_and_a_minicpm_without_factors_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_family("granite", tmp_path / "checkpoint")
    path = write_file(tmp_path / "granite.gguf", "granite", checkpoint, finetuned=False)
    with pytest.raises(ConfigError, match=r"granite with rope\.scaling\.finetuned"):
        resolve_model(ModelOptions(str(path)))
    monkeypatch.delitem(_KEYS, "logits_scaling")
    path = write_file(tmp_path / "minicpm.gguf", "minicpm", checkpoint)
    with pytest.raises(WeightError, match=r"lacks minicpm\.logit_scale"):
        resolve_model(ModelOptions(str(path), tokenizer=str(checkpoint.folder)))


@pytest.mark.parametrize(("name", "text"), [("Qwen2_5_VL", "Qwen2"), ("Qwen3VL", "Qwen3")])
def test_texts_of_models_that_see_are_those_of_the_text_family(name: str, text: str) -> None:
    """Sections of a rotation by equal positions are one rotation, which files of these rely on."""
    sizes = {**checkpoints.DENSE, "head_dim": 12, "rms_norm_eps": 1e-6}
    plain = getattr(transformers, f"{text}ForCausalLM")(
        getattr(transformers, f"{text}Config")(**sizes)
    ).eval()
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    config = getattr(transformers, f"{name}TextConfig")(**sizes, rope_parameters=rope)
    seeing = getattr(transformers, f"{name}TextModel")(config).eval()
    seeing.load_state_dict(plain.model.state_dict())
    ids = torch.tensor([prompt(24)])
    with torch.inference_mode():
        found, expected = (m(input_ids=ids).last_hidden_state for m in (seeing, plain.model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def write(name: str, folder: Path, **fields: Any) -> Checkpoint:
    """Of `families.py`, `checkpoints.py` or `transformers_families.py`."""
    if name in transformers_families.FAMILIES:
        return transformers_families.write_family(name, folder, **fields)
    name = name if name in FAMILIES else name.partition("-")[0]
    if name in HYBRIDS:
        return write_hybrid(name, folder, **fields)
    own = {"deepseek_v2": checkpoints.deepseek_v2, "deepseek_v3": checkpoints.deepseek_v3}
    return own[name](folder, **fields) if name in own else write_family(name, folder, **fields)


@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [
        (
            "qwen3_moe",
            GGMLQuantizationType.Q8_0,
            {"moe_intermediate_size": 32, "norm_topk_prob": True},
        ),
        ("gpt_oss", GGMLQuantizationType.MXFP4, {"intermediate_size": 32, "swiglu_limit": 7.0}),
    ],
    ids=["qwen3_moe", "gpt_oss"],
)
def test_experts_keep_their_blocks(
    name: str,
    kind: GGMLQuantizationType,
    sizes: dict[str, Any],
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    checkpoint = write_family(name, tmp_path / "checkpoint", hidden_size=64, **sizes)
    byte_level_tokenizer.save_pretrained(checkpoint.folder)
    path = write_file(tmp_path / "model.gguf", _FILES[name], checkpoint, kind)
    tokens, tokenizer = prompt(24), str(checkpoint.folder)
    kept = ModelBench(path, tokenizer=tokenizer)
    experts = kept.model.model.layers[0].mlp.experts
    assert experts.quantised_bytes
    assert not experts.dequantised_bytes
    plain = ModelBench(path, tokenizer=tokenizer, quantization="none")
    found, expected = kept.run(tokens, [24]), plain.run(tokens, [24])
    torch.testing.assert_close(found, expected, atol=0.2, rtol=0)
    assert (found - expected).abs().median() < 0.02


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q4_0])
def test_experts_are_mapped_as_one(
    kind: GGMLQuantizationType, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Their tensors lie in the converted file as the layer stacks them."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "norm_topk_prob": True}
    checkpoint = write_family("qwen3_moe", tmp_path / "checkpoint", **sizes)
    byte_level_tokenizer.save_pretrained(checkpoint.folder)
    path = write_file(tmp_path / "model.gguf", "qwen3moe", checkpoint, kind)
    options = ModelOptions(model=str(path), tokenizer=str(checkpoint.folder))
    source = resolve_model(options)
    context = replace(LayerContext.create(torch.float32, 64), quant=source.quantization)
    model = create_model(source.hf_config, context)
    placements = place_tensors(
        list_tensors(source.path), model.weight_mapping, find_targets(model), source.path
    )
    file = source.path / "model.safetensors"
    with WeightFile(file) as weights:
        mapped = map_parameters(weights, placements)
        experts = model.model.layers[1].mlp.experts
        found = {name: values.clone() for name, values in experts.named_parameters()}
    stored = {name: tensor for name, tensor in load_file(file).items() if ".1.mlp.experts." in name}
    assert set(stored) <= mapped
    prefix, count = "model.layers.1.mlp.experts", experts.num_experts
    for name, values in found.items():
        matrix, _, part = name.partition("_")
        parts = ("gate_proj", "up_proj") if matrix == "w13" else ("down_proj",)
        rows = [
            torch.cat([stored[f"{prefix}.{i}.{each}.{part}"] for each in parts])
            for i in range(count)
        ]
        assert torch.equal(values, torch.stack(rows))


@pytest.mark.parametrize("activations", ["float", "auto"])
def test_experts_second_matrices_may_be_of_another_type(
    activations: str,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in Q4_K_M files, half of whose layers have them in Q6_K."""
    sizes = {"moe_intermediate_size": 32, "norm_topk_prob": True}
    checkpoint = write_family("qwen3_moe", tmp_path / "checkpoint", hidden_size=64, **sizes)
    byte_level_tokenizer.save_pretrained(checkpoint.folder)
    kinds = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0
    path = write_file(tmp_path / "model.gguf", "qwen3moe", checkpoint, kinds[0], down=kinds[1])
    tokens, options = prompt(24), {"tokenizer": str(checkpoint.folder), "activations": activations}
    kept = ModelBench(path, **options)
    experts = kept.model.model.layers[0].mlp.experts
    assert experts.choice.query.weights.codes == "int4"
    assert experts.choice.query.down_weights.codes == "int8"
    found = kept.run(tokens, [24])
    plain = ModelBench(path, tokenizer=str(checkpoint.folder), quantization="none")
    assert (found - plain.run(tokens, [24])).abs().median() < 0.02
    monkeypatch.setenv("ATOM_OP_QUANT_EXPERTS", "torch")
    other = ModelBench(path, **options)
    assert other.model.model.layers[0].mlp.experts.choice.dequantises
    near = 1e-4 if activations == "float" else 0.05
    torch.testing.assert_close(found, other.run(tokens, [24]), atol=near, rtol=0)


def write_file(
    path: Path,
    name: str,
    checkpoint: Checkpoint,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    prediction: Mapping[str, torch.Tensor] | None = None,
    splits_up: bool = True,
    gating: int = 2,
    finetuned: bool | None = None,
    down: GGMLQuantizationType | None = None,
) -> Path:
    """Args:
    down: of the experts' second matrices, if it is another kind.
    prediction: tensors of prediction layers.
    splits_up: whether the up-projections of latents are two tensors, as they are since 2025-04.
    finetuned: whether the model was trained further after its rotation was scaled.
    """
    config = checkpoint.reference.config
    writer = GGUFWriter(path, name)
    keys = _KEYS | (_ROUTED_KEYS if hasattr(config, "n_routed_experts") else {})
    if not any(".experts." in module for module in checkpoint.reference.state_dict()):
        keys = {field: key for field, key in _KEYS.items() if "expert" not in key}
    for field, key in keys.items():
        value = getattr(config, field, None)
        if (name, key) == ("minicpm", "attention.scale"):
            continue
        if key == "block_count" and prediction:
            value += 1
        if isinstance(value, bool):
            writer.add_bool(f"{name}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{name}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{name}.{key}", value)
    if hasattr(config, "linear_num_key_heads"):
        for field, key in _DELTA_KEYS.items():
            writer.add_uint32(f"{name}.{key}", getattr(config, field))
        inner = config.linear_value_head_dim * config.linear_num_value_heads
        writer.add_ssm_inner_size(inner)
        writer.add_uint32(f"{name}.full_attention_interval", 4)
        if not hasattr(config, "intermediate_size"):
            writer.add_feed_forward_length(config.moe_intermediate_size)
    rope = config.rope_parameters
    if "full_attention" in rope:
        rope = rope["full_attention"]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if finetuned is not None:
        writer.add_rope_scaling_finetuned(finetuned)
    if "vl" in name or "qwen35" in name:
        writer.add_rope_dimension_sections([size // 6] * 3 + [0])
    if name.startswith("qwen3vl"):
        writer.add_num_deepstack_layers(2)
    if name in ("gemma2", "gemma3", "cohere2", "gpt-oss"):
        writer.add_uint32(f"{name}.attention.sliding_window", config.sliding_window)
    if rope["rope_type"] == "linear":
        writer.add_string(f"{name}.rope.scaling.type", "linear")
        writer.add_float32(f"{name}.rope.scaling.factor", rope["factor"])
    rotated = int(size * rope.get("partial_rotary_factor", 1.0))
    lengths = {"key_length": size, "value_length": size}
    if name in ("deepseek2", "glm-dsa"):
        lengths = latent_keys(config, splits_up)
        rotated = config.qk_rope_head_dim
    for key, length in lengths.items():
        writer.add_uint32(f"{name}.attention.{key}", length)
    if rope["rope_type"] == "yarn":
        writer.add_string(f"{name}.rope.scaling.type", "yarn")
        writer.add_float32(f"{name}.rope.scaling.factor", rope["factor"])
        original = rope["original_max_position_embeddings"]
        writer.add_uint32(f"{name}.rope.scaling.original_context_length", original)
        if "mscale_all_dim" in rope:
            multiplier = rope["mscale_all_dim"] * (0.1 if name == "deepseek2" else 1.0)
            writer.add_float32(f"{name}.rope.scaling.yarn_log_multiplier", multiplier)
    if "llama_4_scaling_beta" in rope:
        writer.add_float32(f"{name}.attention.temperature_scale", rope["llama_4_scaling_beta"])
        for key in ("beta_fast", "beta_slow"):
            writer.add_float32(f"{name}.rope.scaling.yarn_{key}", rope[key])
    if any("correction_bias" in module for module in checkpoint.reference.state_dict()):
        writer.add_uint32(f"{name}.expert_gating_func", gating)
    if prediction:
        writer.add_uint32(f"{name}.nextn_predict_layers", 1)
    writer.add_uint32(f"{name}.rope.dimension_count", rotated)
    writer.add_float32(f"{name}.rope.freq_base", rope["rope_theta"])
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        factor = float(np.sqrt(1 + np.log(scale) / np.log(original)))
        writer.add_uint32(f"{name}.rope.scaling.original_context_length", original)
        writer.add_float32(f"{name}.rope.scaling.attn_factor", factor)
        for which in ("long", "short"):
            factors = np.array(rope[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    tensors = tensors_of(name, checkpoint, prediction or {}, splits_up)
    for tensor_name, values in tensors.items():
        # llama.cpp leaves routers and biases as they are.
        is_plain = values.ndim == 1 or "ffn_gate_inp" in tensor_name or ".bias" in tensor_name
        stored = GGMLQuantizationType.F32 if is_plain else kind
        if down is not None and "ffn_down_exps" in tensor_name:
            stored = down
        raw = quantize(np.ascontiguousarray(values), stored)
        writer.add_tensor(tensor_name, raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def latent_keys(config: PretrainedConfig, splits_up: bool) -> dict[str, int]:
    """Sizes of latent attention: with two up-projections, heads are those of one key."""
    heads = {
        "key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "value_length": config.v_head_dim,
    }
    if splits_up:
        rank = config.kv_lora_rank
        heads = {f"{key}_mla": length for key, length in heads.items()}
        heads |= {"key_length": rank + config.qk_rope_head_dim, "value_length": rank}
    ranks = {"kv_lora_rank": config.kv_lora_rank, "q_lora_rank": config.q_lora_rank}
    return heads | {key: rank for key, rank in ranks.items() if rank is not None}


def stacked_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of prediction layers with one for all experts."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(tensor)
    return {name: torch.stack(t) if len(t) > 1 else t[0] for name, t in found.items()}


def tensors_of(
    name: str, checkpoint: Checkpoint, prediction: Mapping[str, torch.Tensor], splits_up: bool
) -> dict[str, np.ndarray]:
    """Experts' matrices of one kind are one tensor."""
    config = checkpoint.reference.config
    arch = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == name)
    names = get_tensor_name_map(arch, config.num_hidden_layers + 1)
    found = {}
    tensors = {**checkpoint.reference.state_dict(), **stacked_experts(prediction)}
    for module, tensor in tensors.items():
        values = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part = module.split(".")[-2]
        if config.model_type in _PERMUTED and name != "exaone" and part in heads:
            split = values.reshape(heads[part], 2, -1, *values.shape[1:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        if name in ("gemma2", "gemma3") and module.endswith("norm.weight"):
            values = values + 1
        pieces = {module: values}
        if name in ("qwen3next", "qwen35", "qwen35moe") and name_of_delta_net(module):
            pieces = delta_net(module, values, config, tiles=name != "qwen3next")
        elif config.model_type == "gpt_oss" and "experts" in module:
            pieces = gpt_oss_experts(module, values)
        elif module.endswith("experts.gate_up_proj"):
            stem = module.removesuffix("gate_up_proj")
            gate, up = np.split(values, 2, axis=1)
            pieces = {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif module.endswith("experts.down_proj"):
            pieces = {f"{module}.weight": values}
        elif module.endswith("e_score_correction_bias"):
            stem = module.partition("mlp.")[0]
            pieces = {f"{stem}mlp.gate.e_score_correction.bias": values}
        elif part == "kv_b_proj" and splits_up:
            stem, size = module.partition("kv_b_proj")[0], config.qk_nope_head_dim
            by_head = values.reshape(config.num_attention_heads, -1, values.shape[1])
            pieces = {
                f"{stem}k_b_proj.weight": by_head[:, :size].swapaxes(1, 2),
                f"{stem}v_b_proj.weight": by_head[:, size:],
            }
        for piece, each in pieces.items():
            if piece == "lm_head.weight" and config.tie_word_embeddings:
                continue
            stored = names.get_name(piece, try_suffixes=(".weight", ".bias"))
            if piece.startswith("blk."):
                stored = piece
            assert stored is not None, piece
            if piece.endswith("sinks"):
                stored = f"{stored}.weight"
            found[stored] = each[0] if part == "shared_expert_gate" else each
    return found


def name_of_delta_net(module: str) -> bool:
    return ".linear_attn." in module or module.endswith("norm.weight")


def delta_net(
    module: str, values: np.ndarray, config: PretrainedConfig, tiles: bool
) -> dict[str, np.ndarray]:
    """As llama.cpp's converter has it.

    Args:
        tiles: whether heads of values lie by their number within a head of keys.
    """
    stem, _, part = module.removesuffix(".weight").rpartition(".")
    key_heads, value_dim = config.linear_num_key_heads, config.linear_value_head_dim
    keys = key_heads * config.linear_key_head_dim

    def tiled(rows: np.ndarray, size: int) -> np.ndarray:
        if not tiles:
            return rows
        heads = rows.reshape(key_heads, -1, size, *rows.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(rows.shape)

    if ".linear_attn." not in module:
        return {module: values + 1}
    if part == "in_proj_qkvz":
        layer = module.split(".")[2]
        heads = values.reshape(key_heads, -1, values.shape[1])
        dim, width = config.linear_key_head_dim, heads.shape[1] // 2 - config.linear_key_head_dim
        pieces = np.split(heads, [dim, 2 * dim, 2 * dim + width], axis=1)
        q, k, v, z = (piece.reshape(-1, values.shape[1]) for piece in pieces)
        return {
            f"blk.{layer}.attn_qkv.weight": np.concatenate((q, k, v)),
            f"blk.{layer}.attn_gate.weight": z,
        }
    if part in ("in_proj_qkv", "conv1d"):
        rows = values.reshape(len(values), -1)
        return {module: np.concatenate((rows[: 2 * keys], tiled(rows[2 * keys :], value_dim)))}
    if part == "dt_bias":
        return {f"{stem}.dt_proj.bias": tiled(values, 1)}
    if part == "A_log":
        return {module: tiled(-np.exp(values), 1)}
    if part == "out_proj":
        return {module: np.ascontiguousarray(tiled(values.T, value_dim).T)}
    sizes = {"in_proj_z": value_dim, "in_proj_a": 1, "in_proj_b": 1}
    return {module: tiled(values, sizes[part]) if part in sizes else values}


def gpt_oss_experts(module: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of outputs, where the checkpoint has columns, gate and up apart."""
    stem, _, part = module.rpartition(".")
    suffix = "bias" if part.endswith("_bias") else "weight"
    rows = values if suffix == "bias" else values.swapaxes(1, 2)
    if part.startswith("down_proj"):
        return {f"{stem}.down_proj.{suffix}": rows}
    both = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
    return {f"{stem}.{name}.{suffix}": each for name, each in both.items()}


def split_file(path: Path, folder: Path, count: int) -> list[Path]:
    """The tensors of a file in several, whose first has the metadata, as llama.cpp splits them."""
    file = read_gguf(path)
    data = np.memmap(path, np.uint8, "r")
    names, paths = list(file.tensors), []
    for number in range(count):
        part = folder / f"model-{number + 1:05}-of-{count:05}.gguf"
        writer = GGUFWriter(part, file.architecture)
        if number == 0:
            for key in file.metadata:
                if key.startswith(file.architecture):
                    value = file.metadata._values[key]
                    add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
                    add(key, value)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        for name in names[number::count]:
            tensor = file.tensors[name]
            raw = data[tensor.offset : tensor.offset + tensor.num_bytes].view(np.float32)
            writer.add_tensor(name, raw.reshape(tensor.shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(part)
    return paths


def test_split_files(tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    checkpoint = write_family("qwen2", tmp_path / "checkpoint")
    byte_level_tokenizer.save_pretrained(checkpoint.folder)
    whole = write_file(tmp_path / "whole.gguf", "qwen2", checkpoint)
    folder = tmp_path / "parts"
    folder.mkdir()
    paths = split_file(whole, folder, 3)
    tokens, tokenizer = prompt(9), str(checkpoint.folder)
    for model in (folder, paths[1]):
        found = ModelBench(model, tokenizer=tokenizer).run(tokens, [9])
        torch.testing.assert_close(found, checkpoint.logits(tokens), atol=1e-4, rtol=0)
    shutil.copy(paths[0], paths[1])
    with pytest.raises(Exception, match=r"model-00002-of-00003\.gguf holds .* once more"):
        resolve_model(ModelOptions(str(folder), tokenizer=tokenizer))
    paths[1].unlink()
    with pytest.raises(ConfigError, match=r"one of 3 files; missing: model-00002-of-00003\.gguf"):
        resolve_model(ModelOptions(str(paths[0]), tokenizer=tokenizer))
