"""Files of converted checkpoints on file systems that take less than they are given."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atom.model_loader.safetensors.writer import TensorGroup, TensorSpec, write_checkpoint


class Slow(io.FileIO):
    def write(self, values: Any) -> int:
        return super().write(memoryview(values)[:7])


def test_a_file_system_may_take_less_than_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.arange(30, dtype=torch.uint8).view(2, 15)}
    specs = [TensorSpec(name, tuple(of.shape), of.dtype) for name, of in tensors.items()]
    groups = [
        TensorGroup((spec,), lambda values=tensors[spec.name]: iter([(values,)])) for spec in specs
    ]
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: pwrite(file, parts[0][:7], at))
    monkeypatch.setattr(Path, "open", lambda path, mode, **_: Slow(path, mode))
    with ThreadPoolExecutor(1) as pool:
        write_checkpoint(tmp_path, specs, groups, 10**6, pool, lambda _: None)
    monkeypatch.undo()
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], of) for name, of in tensors.items())
