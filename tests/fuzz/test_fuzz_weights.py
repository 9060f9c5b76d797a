"""Damaged weight files: safetensors and GGUF."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random

import pytest
import torch
from fuzz.damage import damaged_bytes, damaged_json
from fuzz.judge import cases, judge
from gguf import GGMLQuantizationType
from model_loader import gguf_files
from safetensors.torch import save
from transformers import PreTrainedTokenizerFast

from atom.config import ConfigError
from atom.model_loader.errors import WeightError
from atom.model_loader.gguf import config as gguf_config
from atom.model_loader.gguf.file import read_gguf
from atom.model_loader.gguf.tensors import plan_tensors, read_values
from atom.model_loader.gguf.tokenizer import write_tokenizer
from atom.model_loader.safetensors.reader import map_tensor, read_header

REFUSALS = (ConfigError, WeightError)


@pytest.fixture(scope="module")
def weights() -> bytes:
    tensors = {
        "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
        "a.bias": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1.0),
        "codes": torch.arange(8, dtype=torch.uint8),
        "fp8": torch.ones(4, dtype=torch.float8_e4m3fn),
    }
    return save(tensors, {"format": "pt"})


@pytest.mark.parametrize("seeds", cases(400, 30_000))
def test_safetensors(weights: bytes, tmp_path: Path, seeds: range) -> None:
    path = tmp_path / "model.safetensors"
    end = 8 + int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8:end])

    def read(seed: int) -> None:
        random = Random(seed)
        if random.random() < 0.7:
            text = json.dumps(damaged_json(header, random)).encode()
            data = len(text).to_bytes(8, "little") + text + weights[end:]
            if random.random() < 0.2:
                data = damaged_bytes(data, random, 8 + len(text))
        else:
            data = damaged_bytes(weights, random, end)
        path.write_bytes(data)
        for tensor in read_header(path, len(data)):
            if tensor.torch_dtype is not None:
                assert map_tensor(tensor).nbytes == tensor.num_bytes

    judge(seeds, read, REFUSALS)


@pytest.fixture(scope="module")
def gguf_bytes(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> bytes:
    model = gguf_files.tiny_model(vocab_size=len(byte_level_tokenizer))
    metadata = gguf_files.metadata_of(model)
    metadata |= gguf_files.byte_level_metadata(byte_level_tokenizer)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    kind = GGMLQuantizationType.Q8_0
    return gguf_files.write_gguf(path, model, metadata, kind).read_bytes()


@pytest.mark.parametrize("seeds", cases(150, 20_000))
def test_gguf(gguf_bytes: bytes, tmp_path: Path, seeds: range) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes)
    first = min(tensor.offset for tensor in read_gguf(path).tensors.values())

    def read(seed: int) -> None:
        random = Random(seed)
        path.write_bytes(damaged_bytes(gguf_bytes, random, first))
        file = read_gguf(path)
        gguf_config.check_architecture(file)
        config = gguf_config.config_dict(file, torch.float32)
        gguf_config.generation_config_dict(file)
        for tensor in plan_tensors(file, config)[:3]:
            for values in read_values(tensor, torch.float32):
                assert values.isfinite().all()
        if seed % 4 == 0:
            with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
                write_tokenizer(file, Path(folder))

    judge(seeds, read, REFUSALS)
