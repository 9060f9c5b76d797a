"""GGUF files whose blocks are kept: bit by bit, and as a model that computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from gguf_files import random_blocks, tiny_model
from quantised.packing import logits

from atom.config import ConfigError, ModelOptions
from atom.model_loader.gguf.blocks import read_part
from atom.model_loader.gguf.config import config_dict
from atom.model_loader.gguf.convert import choose_kept, converted_folder
from atom.model_loader.gguf.file import read_gguf
from atom.model_loader.gguf.tensors import plan_tensors
from atom.model_loader.source import resolve_model
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.quant.formats.gguf import TYPES, GgufConfig, GgufMethod, parse
from atom.model_ops.quant.weights import QuantWeights, dequantise

WriteTiny = Callable[..., Path]
_ROWS, _COLUMNS = 37, 512


def random_rows(kind: str) -> np.ndarray:
    return random_blocks(GGMLQuantizationType[kind], _ROWS, _COLUMNS)


def kept(kind: str, raw: np.ndarray) -> QuantWeights:
    method = GgufMethod(kind)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    tensors = {name: read_part(kind, name, torch.from_numpy(raw), size) for name in method.stored}
    for name, stored in method.stored.items():
        assert tensors[name].dtype == stored.dtype
        assert tensors[name].shape == (_ROWS, _COLUMNS // stored.axes[1].per)
    return method.convert(tensors, [_ROWS], _COLUMNS)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_means_what_the_gguf_package_says(kind: str) -> None:
    raw = random_rows(kind)
    expected = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]))
    assert torch.equal(dequantise(kept(kind, raw)), expected)


@pytest.mark.parametrize("kind", TYPES)
def test_kernels_read_the_same_codes(kind: str) -> None:
    """Of any bits, and of a number of blocks that no vector divides."""
    if reason := native_build().reason:
        pytest.skip(reason)
    raw = random_rows(kind)[:, : -GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]]
    raw = np.random.default_rng(0).integers(0, 256, raw.shape, np.uint8)
    blocks, size = torch.from_numpy(raw), GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    for name in GgufMethod(kind).stored:
        expected = read_part(kind, name, blocks, size)
        found = read_part(kind, name, blocks, size, by_kernels=True)
        assert found.dtype == expected.dtype
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_packed_weights(kind: str) -> None:
    """The native gather reads what the native product is given."""
    from atom.model_ops.kernels.native.quant.embedding import quant_embedding
    from atom.model_ops.kernels.native.quant.pack import prepare

    if reason := native_build().reason:
        pytest.skip(reason)
    weights = kept(kind, random_rows(kind))
    packed = prepare(weights, torch.float32)
    ids = torch.tensor([36, 0, 17, 0, 15])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(quant_embedding(ids, packed, dtype), dequantise(weights, dtype)[ids])
    with pytest.raises(IndexError, match="row 37 of a matrix of 37, at 1"):
        quant_embedding(torch.tensor([1, 37]), packed, torch.float32)


@pytest.mark.parametrize(
    ("kind", "tied"), [("Q4_0", False), ("Q4_1", False), ("Q8_0", True), ("Q8_0", False)]
)
def test_kept_and_unpacked_files_give_the_same_logits(
    write_tiny: WriteTiny, kind: str, tied: bool
) -> None:
    path = write_tiny(
        tiny_model(tie_word_embeddings=tied, vocab_size=330), GGMLQuantizationType[kind]
    )
    source = resolve_model(ModelOptions(str(path), dtype="float32"))
    assert isinstance(source.quantization, GgufConfig)
    assert source.quantization.types["model.embed_tokens"] == kind
    expected, found = (
        logits(folder, activations=activations)
        for folder, activations in (
            (converted_folder(read_gguf(path), torch.float32, True), "auto"),
            (source.path, "float"),
        )
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=3e-5)
    rounded = logits(source.path, activations="int8")
    assert 1e-5 < (rounded - expected).abs().max() < 0.1 * expected.abs().max()


def test_with_tiles_a_kept_file_computes_the_unpacked_one_bit_by_bit(
    write_tiny: WriteTiny,
) -> None:
    from atom.model_ops.kernels.native.bindings import constant
    from atom.model_ops.kernels.native.build import native_build

    if native_build().reason or not constant("has_tiles"):
        pytest.skip("the processor has no AMX-BF16")
    path = write_tiny(tiny_model(vocab_size=330), GGMLQuantizationType["Q4_1"])
    source = resolve_model(ModelOptions(str(path), dtype="bfloat16"))
    expected = logits(converted_folder(read_gguf(path), torch.bfloat16, True), torch.bfloat16)
    assert torch.equal(logits(source.path, torch.bfloat16, activations="float"), expected)
    assert not torch.equal(logits(source.path, torch.bfloat16), expected)


def test_types_without_a_format_become_numbers(write_tiny: WriteTiny) -> None:
    kinds = {"attn_v": "Q8_0", "ffn_up": "IQ3_S"}
    path = write_tiny(tiny_model(vocab_size=330), GGMLQuantizationType["Q4_0"])
    file = read_gguf(path)
    for name, tensor in file.tensors.items():
        if kind := next((k for part, k in kinds.items() if part in name), None):
            stored = GGMLQuantizationType[kind]
            elements, block_bytes = GGML_QUANT_SIZES[stored]
            num_bytes = tensor.num_elements // elements * block_bytes
            file.tensors[name] = replace(tensor, kind=stored, num_bytes=num_bytes)
    found = choose_kept(plan_tensors(file, config_dict(file, torch.float32)))
    assert found.dequantised == {"of type IQ3_S": 2}
    assert found.types["model.layers.0.self_attn.q_proj"] == "Q4_0"
    assert found.types["model.layers.0.self_attn.v_proj"] == "Q8_0"
    assert found.types["model.layers.0.mlp.gate_proj"] == "Q4_0"
    assert "model.layers.0.mlp.up_proj" not in found.types


def test_the_folder_says_what_it_holds(write_tiny: WriteTiny) -> None:
    path = write_tiny(tiny_model(vocab_size=330), GGMLQuantizationType["Q4_1"])
    folder = converted_folder(read_gguf(path), torch.float32, True, keeps_blocks=True)
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert stated["quant_method"] == "gguf"
    assert len(stated["types"]["Q4_1"]) == 16
    assert str(parse(stated, {})) == "GGUF Q4_1 (16 matrices)"


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"types": {"Q9": ["a"]}}, "type Q9 is not supported"),
        ({"types": {"Q8_0": "a"}}, "is no list of names"),
        ({"types": [1]}, "is no object"),
        ({"dequantised": {"a": "b"}}, "holds other values than numbers"),
    ],
)
def test_configurations_that_are_wrong(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(stated, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "none", "activations": "int8"}, "weights are not quantised"),
        ({"quantization": "fp8", "activations": "int8"}, "not multiplied with int8 inputs"),
        ({"activations": "int4"}, "activations must be one of auto, int8, float"),
    ],
)
def test_options_that_cannot_be_honoured(
    write_tiny: WriteTiny, options: dict[str, Any], message: str
) -> None:
    path = write_tiny(tiny_model(vocab_size=330), GGMLQuantizationType["Q8_0"])
    with pytest.raises(ConfigError, match=message):
        logits(path, **options)
