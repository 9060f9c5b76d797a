"""Scales of an 8-bit KV cache find their layers, under every published name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import checkpoints
from models.harness import load_model
from safetensors.torch import load_file, save_file

from atom.config import ConfigError, ModelOptions
from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import WeightError
from atom.model_ops.attention.metadata import KVCacheTensor, LatentCacheTensor

CPU = torch.device("cpu")
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz

Scales = dict[str, float | torch.Tensor]


def add_scales(folder: Path, scales: Scales) -> Path:
    file = folder / "model.safetensors"
    added = {name: torch.as_tensor(value) for name, value in scales.items()}
    save_file({**load_file(file), **added}, file, metadata={"format": "pt"})
    return folder


def bound_scales(folder: Path, storage: torch.dtype) -> list[list[float]]:
    """The scales of every layer's cache."""
    model = load_model(folder, max_model_len=64)
    cache = PagedCache(attention_layers(model), 4, storage, CPU)
    tensors = cache.allocate_kv_cache_tensors(2)
    assert list(tensors) == ["kv_cache", "kv_scale"]
    assert tensors["kv_scale"].dtype == torch.float32
    bind_kv_caches(model, [cache])
    found = []
    for layer in attention_layers(model).values():
        view = layer.kv_cache
        if isinstance(view, KVCacheTensor):
            scales = [view.key_scale, view.value_scale]
        else:
            assert isinstance(view, LatentCacheTensor)
            scales = [view.scale]
        assert all(s is not None and s.shape == (1,) for s in scales)
        found.append([float(s) for s in scales if s is not None])
    assert found == tensors["kv_scale"].view(len(found), -1).tolist()
    return found


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoints.llama(tmp_path, num_hidden_layers=2).folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_published_names(llama: Path, key: str, value: str) -> None:
    at = "model.layers.1.self_attn"
    scales = {f"{at}.{key}": 0.25, f"{at}.{value}": torch.tensor([0.5], dtype=torch.bfloat16)}
    unused = {f"{at}.q_scale": 3.0, f"{at}.prob_output_scale": 3.0, f"{at}.q_proj.q_scale": 3.0}
    add_scales(llama, scales | unused)
    assert bound_scales(llama, FN) == [[1, 1], [0.25, 0.5]]
    assert bound_scales(llama, FNUZ) == [[1, 1], [0.5, 1.0]]


def test_one_scale_for_both(llama: Path) -> None:
    add_scales(llama, {"model.layers.0.self_attn.kv_scale": 0.125})
    assert bound_scales(llama, FN) == [[0.125, 0.125], [1, 1]]


def test_a_latent_takes_the_wider_range(tmp_path: Path) -> None:
    folder = checkpoints.kimi_k25(tmp_path).folder
    layers = "language_model.model.layers"
    scales = {
        f"{layers}.0.self_attn.k_proj.k_scale": 0.5,
        f"{layers}.0.self_attn.v_proj.v_scale": 0.25,
        f"{layers}.2.self_attn.k_scale": 0.125,
    }
    add_scales(folder, dict(scales))
    assert bound_scales(folder, FN) == [[0.5], [1], [0.125]]
    assert bound_scales(folder, FNUZ) == [[1.0], [1], [0.25]]


def test_other_storage_needs_no_scales(llama: Path) -> None:
    add_scales(llama, {"model.layers.0.self_attn.k_scale": 0.125})
    model = load_model(llama, max_model_len=64)
    cache = PagedCache(attention_layers(model), 4, torch.bfloat16, CPU)
    assert list(cache.allocate_kv_cache_tensors(2)) == ["kv_cache"]


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"model.layers.0.self_attn.k_scale": torch.ones(2)}, "shape \\[2\\]; only one scale"),
        ({"model.layers.0.self_attn.k_scale": 0.0}, "positive and finite, got 0"),
        ({"model.layers.0.self_attn.v_scale": float("nan")}, "positive and finite, got nan"),
        ({"model.layers.7.self_attn.v_scale": 1.0}, "unexpected tensors .*layers.7"),
        (
            {"model.layers.0.self_attn.k_scale": 1.0, "model.layers.0.self_attn.attn.k_scale": 1.0},
            "given twice",
        ),
    ],
)
def test_wrong_scales_are_named(llama: Path, scales: Scales, message: str) -> None:
    add_scales(llama, scales)
    with pytest.raises(WeightError, match=message):
        load_model(llama, max_model_len=64)


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def test_a_checkpoint_may_quantise_the_cache_alone(llama: Path) -> None:
    """Its weights are plain numbers."""
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}}
    checkpoints.edit_config(llama, quantization_config={**quantization, "kv_cache_scheme": SCHEME})
    add_scales(llama, {"model.layers.0.self_attn.k_scale": 0.5})
    assert bound_scales(llama, FN) == [[0.5, 1], [1, 1]]
    weights = {"group_0": {"weights": {"num_bits": 8}, "targets": ["Linear"]}}
    for change in (
        {"config_groups": weights, "kv_cache_scheme": SCHEME},
        {"kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}},
        {"kv_cache_scheme": {**SCHEME, "num_bits": 4}},
        {},
    ):
        checkpoints.edit_config(llama, quantization_config={**quantization, **change})
        with pytest.raises(ConfigError, match=r"quantization_config|quant_method"):
            resolve_model(ModelOptions(model=str(llama)))
    assert json.loads((llama / "config.json").read_text())["quantization_config"] == quantization
