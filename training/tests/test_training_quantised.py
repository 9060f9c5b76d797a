"""Quantised models as targets of a draft's training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import checkpoints
from quantised.packing import TOKENS, quantised
from quantised.test_fp8 import BLOCKS, WIDE, pack_blocks

from atom.config import CacheOptions, EngineConfig, ModelOptions
from atom.model_loader.source import resolve_model
from atom.model_ops.kernels.torch import quant as torch_quant
from atom_train.data.dataset import Example
from atom_train.data.features import TargetFeatures
from atom_train.target_parts import load_target_parts


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineConfig, EngineConfig]:
    """Of a target in FP8, and of the same one in plain numbers; the activations are exact."""
    monkeypatch.setattr(torch_quant.DenseWeights, "round_inputs", lambda _, x: x)
    folder = checkpoints.llama(tmp_path / "plain", **WIDE).folder
    stored, dense = quantised(folder, BLOCKS, pack_blocks())

    def config(folder: Path) -> EngineConfig:
        model = ModelOptions(model=str(folder), dtype="float32")
        return EngineConfig(model=model, cache=CacheOptions(kv_cache_memory=1 << 23), device="cpu")

    return config(stored), config(dense)


def test_features_of_a_quantised_target(engine: tuple[EngineConfig, EngineConfig]) -> None:
    tokens = torch.tensor(TOKENS, dtype=torch.int32)
    example = Example(0, tokens, torch.ones(len(tokens), dtype=torch.bool))
    quantised, dense = (TargetFeatures(config, (1, 2)).features([example])[0] for config in engine)
    assert dense.shape == (len(tokens) - 1, 3 * WIDE["hidden_size"])
    torch.testing.assert_close(quantised, dense, rtol=1e-4, atol=1e-3)


def test_parts_of_a_quantised_target(engine: tuple[EngineConfig, EngineConfig]) -> None:
    """The head is dequantised; quantised MLPs are no initial values."""
    quantised, dense = (load_target_parts(config, resolve_model(config.model)) for config in engine)
    assert torch.equal(quantised.embedding, dense.embedding)
    assert torch.equal(quantised.head, dense.head)
    assert quantised.mlp is None
    assert dense.mlp is not None
