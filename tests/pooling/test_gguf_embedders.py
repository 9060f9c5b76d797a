"""Embedding models in GGUF files answer as the same weights in safetensors do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pooling_checkpoints as checkpoints
import pytest
import torch
from gguf import GGUFWriter, PoolingType
from model_loader.gguf_files import byte_level_metadata, metadata_of, tiny_model, write_gguf
from transformers import BertConfig, BertModel, BertTokenizerFast

from atom.config import ConfigError, ModelOptions
from atom.model_loader.gguf.pooling import pooled_file, stated_pooling
from atom.model_loader.source import resolve_model
from atom.pooling.answers import cut_vectors

MODES = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_CACHE", str(tmp_path / "cache"))


def vectors(path: Path, texts: tuple[str, ...] = checkpoints.TEXTS) -> np.ndarray:
    engine = checkpoints.create_engine(path)
    inputs = [engine.loaded.texts.encode(text, "input") for text in texts]
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


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PIECES = (*SPECIAL, "[unused1]", *checkpoints.WORDS, "##es", ".")
NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def as_written(piece: str) -> str:
    """llama.cpp marks beginnings of words, not continuations."""
    if piece in SPECIAL:
        return piece
    return piece.removeprefix("##") if piece.startswith("##") else "\u2581" + piece


def bert_file(path: Path, model: BertModel, **changes: Any) -> Path:
    """As llama.cpp's converter writes it."""
    config = model.config
    writer = GGUFWriter(path, "bert")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(changes.get("causal", False))
    writer.add_pooling_type(PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([as_written(piece) for piece in PIECES])
    writer.add_token_types([3 if piece in SPECIAL else 1 for piece in PIECES])
    for name, number in {"unknown": 1, "seperator": 3, "padding": 0, "mask": 4, "cls": 2}.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if stem.startswith("encoder.layer."):
            _, _, layer, part = stem.split(".", 3)
            writer.add_tensor(f"blk.{layer}.{NAMES[part]}.{suffix}", tensor.numpy())
        elif not stem.startswith("pooler"):
            writer.add_tensor(f"{NAMES[stem]}.{suffix}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.usefixtures("cache")
def test_bert(tmp_path: Path) -> None:
    config = BertConfig(**{**checkpoints.SIZES, "vocab_size": len(PIECES)})
    torch.manual_seed(0)
    model = BertModel(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    folder = tmp_path / "safetensors"
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(PIECES))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    checkpoints.write_modules(folder, checkpoints.MEAN)
    texts = (*checkpoints.TEXTS, "The F\u00f3x\u00e8s. dog", "unknown")
    expected = vectors(folder, texts)
    found = vectors(bert_file(tmp_path / "bert.gguf", model), texts)
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(found[0] - found[1]).max() > 1e-2
    with pytest.raises(ConfigError, match=r"bert with attention\.causal is no encoder"):
        vectors(bert_file(tmp_path / "causal.gguf", model, causal=True))


@pytest.mark.usefixtures("cache")
def test_what_a_file_is_for(tmp_path: Path) -> None:
    path, _ = qwen3_file(tmp_path, 3)
    assert stated_pooling(path) == 3
    with pytest.raises(ConfigError, match="is a model to embed texts"):
        resolve_model(ModelOptions(str(path)))
    assert pooled_file(tmp_path) == path
    (tmp_path / "another.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match=r"name one of another\.gguf, embedding\.gguf"):
        pooled_file(tmp_path)
    # Qwen3-Embedding is a language model, too.
    assert resolve_model(ModelOptions(str(path), task="generate")).name == str(path)
    with pytest.raises(ConfigError, match=r"task is score, and .*GGUF files are read that"):
        checkpoints.create_engine(path, task="score")
    scores, _ = qwen3_file(tmp_path, 4)
    with pytest.raises(ConfigError, match="pooling_type=4, which scores pairs"):
        checkpoints.create_engine(scores)
