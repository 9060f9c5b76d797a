"""Embedding models in GGUF files answer as the same weights in safetensors do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pooling_checkpoints as checkpoints
import pytest
import torch
from model_loader.gguf_files import byte_level_metadata, metadata_of, tiny_model, write_gguf

from atom.config import ConfigError, ModelOptions
from atom.model_loader.gguf.pooling import stated_pooling
from atom.model_loader.source import resolve_model
from atom.pooling.answers import cut_vectors

MODES = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_CACHE", str(tmp_path / "cache"))


def vectors(path: Path) -> np.ndarray:
    engine = checkpoints.create_engine(path)
    inputs = [engine.loaded.texts.encode(text, "input") for text in checkpoints.TEXTS]
    found = cut_vectors(engine, engine.submit(inputs).result(), None)
    engine.shutdown()
    return found


def qwen3_file(folder: Path, pooling: int) -> tuple[Path, torch.nn.Module]:
    """As llama.cpp's converter writes a Qwen3-Embedding, whose texts end with a token."""
    model = tiny_model("qwen3", vocab_size=270, tie_word_embeddings=True)
    tokenizer = checkpoints.qwen_tokenizer()
    metadata = {
        **metadata_of(model),
        "qwen3.pooling_type": pooling,
        **byte_level_metadata(tokenizer, "qwen2"),
        "tokenizer.ggml.eos_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_bos_token": False,
    }
    return write_gguf(folder / "embedding.gguf", model, metadata), model


@pytest.mark.parametrize("pooling", MODES)
@pytest.mark.usefixtures("cache")
def test_qwen3(pooling: int, tmp_path: Path) -> None:
    path, model = qwen3_file(tmp_path, pooling)
    folder = tmp_path / "safetensors"
    model.save_pretrained(folder)
    checkpoints.qwen_tokenizer().save_pretrained(folder)
    checkpoints.write_modules(folder, {f"pooling_mode_{MODES[pooling]}": True})
    expected = vectors(folder)
    found = vectors(path)
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(found[0] - found[1]).max() > 1e-2


@pytest.mark.usefixtures("cache")
def test_what_a_file_is_for(tmp_path: Path) -> None:
    path, _ = qwen3_file(tmp_path, 3)
    assert stated_pooling(path) == 3
    with pytest.raises(ConfigError, match="is a model to embed texts"):
        resolve_model(ModelOptions(str(path)))
    # Qwen3-Embedding is a language model, too.
    assert resolve_model(ModelOptions(str(path), task="generate")).name == str(path)
    with pytest.raises(ConfigError, match=r"task is score, and .*GGUF files are read that"):
        checkpoints.create_engine(path, task="score")
    scores, _ = qwen3_file(tmp_path, 4)
    with pytest.raises(ConfigError, match="pooling_type=4, which scores pairs"):
        checkpoints.create_engine(scores)
