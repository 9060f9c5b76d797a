"""Damaged configurations and tokenizers: `config.json`, `tokenizer.json`, its config."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fuzz.damage import damaged_bytes, damaged_json
from fuzz.judge import cases, judge
from models import checkpoints
from transformers import PreTrainedTokenizerFast

from atom.config import ConfigError, ModelOptions
from atom.model_loader.errors import WeightError
from atom.model_loader.read_files import read_tokenizer
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import build_model
from atom.model_ops.layer_context import LayerContext
from atom.models.registry import create_model
from atom.platform import cpu_platform

REFUSALS = (ConfigError, WeightError)


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    found = checkpoints.llama(tmp_path_factory.mktemp("json") / "llama").folder
    byte_level_tokenizer.save_pretrained(found)
    return Path(found)


def write_damaged(path: Path, original: Any, random: Random) -> None:
    text = json.dumps(damaged_json(original, random), ensure_ascii=False).encode("utf-8", "replace")
    path.write_bytes(damaged_bytes(text, random) if random.random() < 0.1 else text)


@pytest.mark.parametrize("seeds", cases(60, 2000))
def test_config(folder: Path, tmp_path: Path, seeds: range) -> None:
    """The engine's way until the model stands."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    original = json.loads((folder / "config.json").read_text())

    def read(seed: int) -> None:
        write_damaged(copy / "config.json", original, Random(seed))
        options = ModelOptions(model=str(copy))
        source = resolve_model(options)
        context = LayerContext.create(torch.float32, 64, cpu_platform())
        build_model(partial(create_model, source.hf_config), source, context, options)

    judge(seeds, read, REFUSALS)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("seeds", cases(40, 2000))
def test_tokenizer(folder: Path, tmp_path: Path, name: str, seeds: range) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    original = json.loads((folder / name).read_text())

    def read(seed: int) -> None:
        write_damaged(copy / name, original, Random(seed))
        read_tokenizer(copy, trust_remote_code=False)

    judge(seeds, read, REFUSALS, least_share=0)
