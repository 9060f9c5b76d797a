"""Which parameters stay in the file that a GGUF file was converted to, and which are copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import tiny_model
from safetensors.torch import load_file
from torch import nn

from atom.config import ModelOptions
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import load_weights
from atom.model_ops.layer_context import LayerContext
from atom.models.registry import create_model

WriteTiny = Callable[..., Path]
BFLOAT16 = GGMLQuantizationType.BF16


def load(path: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Path]:
    """The engine's own model, and the folder that its weights are from."""
    options = ModelOptions(model=str(path))
    source = resolve_model(options)
    model = create_model(source.hf_config, LayerContext.create(dtype, 64))
    load_weights(model, model.weight_mapping, source, options)
    return model, source.path


def mapped(model: nn.Module) -> set[str]:
    """The last names of parameters whose memory is a file's."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            start, end = line.split()[0].split("-")
            ranges.append(range(int(start, 16), int(end, 16)))
    return {
        ".".join(name.split(".")[-2:])
        for name, parameter in model.named_parameters()
        if any(parameter.data_ptr() in each for each in ranges)
    }


def wide_model(**fields: object) -> nn.Module:
    """Its vectors, too, are whole lines of caches."""
    return tiny_model(hidden_size=64, intermediate_size=96, vocab_size=330, **fields)


@pytest.mark.parametrize("tied", [False, True])
def test_stacked_matrices_are_mapped_as_one(write_tiny: WriteTiny, tied: bool) -> None:
    model, folder = load(write_tiny(wide_model(tie_word_embeddings=tied), BFLOAT16))
    products = {"qkv_proj.weight", "o_proj.weight", "gate_up_proj.weight", "down_proj.weight"}
    assert mapped(model) >= products
    expected = load_file(folder / "model.safetensors")
    ours = dict(model.named_parameters())
    for stacked, parts in {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }.items():
        rows = [expected[f"model.layers.1.{part}.weight"] for part in parts]
        assert torch.equal(ours[f"model.layers.1.{stacked}.weight"], torch.cat(rows))


def test_a_changed_parameter_does_not_change_the_file(write_tiny: WriteTiny) -> None:
    model, folder = load(write_tiny(wide_model(), BFLOAT16))
    before = (folder / "model.safetensors").read_bytes()
    for parameter in model.parameters():
        parameter.data.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_another_dtype_is_a_copy(write_tiny: WriteTiny) -> None:
    model, _ = load(write_tiny(wide_model(), BFLOAT16), torch.float32)
    assert not mapped(model)


def test_files_that_others_may_change_are_copied(tmp_path: Path) -> None:
    wide_model().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model, _ = load(tmp_path / "model")
    assert not mapped(model)
