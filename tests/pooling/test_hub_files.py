"""What is fetched of a hub's repository, of which embedding models have files in folders."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from atom.config import ModelOptions
from atom.model_loader.hub import download, download_dense

FILES = (
    *("config.json", "modules.json", "model.safetensors", "1_Pooling/config.json"),
    *("2_Dense/config.json", "2_Dense/model.safetensors", "onnx/model.safetensors"),
    *("2_Dense/pytorch_model.bin", "pytorch_model.bin", "openvino/2_Dense/model.safetensors"),
)


def test_dense_layers_are_fetched_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[set[str]] = []

    def snapshot(model: str, **how: Any) -> str:
        assert (model, how["revision"]) == ("owner/name", "main")
        fetched.append(
            {
                file
                for file in FILES
                if any(fnmatch(file, pattern) for pattern in how["allow_patterns"])
                and not any(fnmatch(file, pattern) for pattern in how["ignore_patterns"])
            }
        )
        return "folder"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    options = ModelOptions(model="owner/name", revision="main")
    assert download("owner/name", options) == Path("folder")
    assert download_dense("owner/name", options) == Path("folder")
    assert fetched == [{*FILES[:5]}, {"2_Dense/model.safetensors"}]
