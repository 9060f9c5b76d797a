"""Quantised models are refused when they do not fit, with what they would need."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from models import checkpoints
from models.harness import load_model

from atom.config import ConfigError
from atom.model_loader import sketch


def needed(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: str) -> str:
    """The message on a machine without memory, which tells bytes instead of gigabytes."""
    monkeypatch.setattr(sketch, "total_memory_bytes", lambda _: 0)
    monkeypatch.setattr(sketch, "_GB", 1)
    with pytest.raises(ConfigError, match="and the cpu has 0") as caught:
        load_model(folder, 8, **options)
    return str(caught.value)


@pytest.mark.parametrize("write", [checkpoints.llama, checkpoints.kimi_k25])
def test_weights_are_dequantised_beside_those_still_stored(
    tmp_path: Path, write: Callable[[Path], checkpoints.Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak is at the last layer, beside all others in float32."""
    monkeypatch.setenv("ATOM_OP_QUANT_EXPERTS", "torch")  # C++ keeps them packed
    folder = write(tmp_path).folder
    dense = sum(p.nbytes for p in load_model(folder, 8).parameters())
    plain = re.search(r"take ([0-9.]+) GB in float32, and", needed(folder, monkeypatch))
    message = needed(folder, monkeypatch, quantization="mxfp4")
    found = re.search(r"take ([0-9.]+) GB as stored, up to ([0-9.]+) GB while layers", message)
    assert plain is not None
    assert found is not None
    assert dense <= float(plain[1]) < dense + 100  # with the scales of a KV cache
    stored, peak = map(float, found.groups())
    assert stored < 0.6 * dense
    assert dense < peak < dense + stored / 2
