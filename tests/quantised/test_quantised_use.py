"""Quantised targets with dummy weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import checkpoints
from models.harness import ModelBench
from quantised.packing import TOKENS
from quantised.test_fp8 import BLOCKS


@pytest.mark.parametrize("config", [BLOCKS, {"quant_method": "fp8", "activation_scheme": "static"}])
@pytest.mark.parametrize("family", ["llama", "kimi_k25"])
def test_dummy_weights(tmp_path: Path, family: str, config: dict[str, object]) -> None:
    folder = getattr(checkpoints, family)(tmp_path / "plain").folder
    (folder / "model.safetensors").unlink()
    checkpoints.edit_config(folder, quantization_config=config)
    outputs = [ModelBench(folder, load_format="dummy").run(TOKENS, [5, 1]) for _ in range(2)]
    assert outputs[0].isfinite().all()
    assert outputs[0].std() > 1e-4
    assert torch.equal(*outputs)
