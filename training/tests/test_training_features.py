"""What a draft learns from is what the target computes, at every token."""

from __future__ import annotations

from pathlib import Path

import torch
from models import checkpoints

from atom.config import CacheOptions, EngineConfig, ModelOptions
from atom_train.data.dataset import Example
from atom_train.data.features import TargetFeatures

AUX = (1, 2)
SIZE = 64


def test_features_are_the_targets_at_every_token(tmp_path: Path) -> None:
    checkpoint = checkpoints.llama(tmp_path, hidden_size=SIZE)
    model = ModelOptions(model=str(tmp_path), dtype="float32")
    cache = CacheOptions(kv_cache_memory=1 << 23)
    source = TargetFeatures(EngineConfig(model=model, cache=cache, device="cpu"), AUX)
    texts = [checkpoints.prompt(length, seed=length) for length in (5, 40, 40)]
    examples = [
        Example(i, torch.tensor(ids, dtype=torch.int32), torch.ones(len(ids), dtype=torch.bool))
        for i, ids in enumerate(texts)
    ]
    found = source.features(examples)
    for ids, features in zip(texts, found, strict=True):
        assert features.shape == (len(ids) - 1, (len(AUX) + 1) * SIZE)
        entering = checkpoint.hidden_states(ids)
        expected = torch.cat([entering[i] for i in (*AUX, -1)], dim=-1)[:-1].float()
        torch.testing.assert_close(features, expected, atol=1e-3, rtol=1e-3)
