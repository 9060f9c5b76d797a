"""Tensors that a GGUF file holds together or apart, by their shapes and places alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from atom.model_loader.errors import WeightError
from atom.model_loader.gguf.architectures import _WITH_TEMPERATURE, ARCHITECTURES
from atom.model_loader.gguf.file import GGUFTensor
from atom.model_loader.gguf.tensors import _check_up_projection, _parts

F32 = GGMLQuantizationType.F32


def tensor(*shape: int) -> GGUFTensor:
    whole = GGUFTensor(Path("model.gguf"), "blk.0.x.weight", shape, F32, 1000, 0)
    return replace(whole, num_bytes=4 * whole.num_elements)


def test_each_expert_has_its_part() -> None:
    parts = list(_parts("experts.*.up_proj.weight", tensor(3, 4, 5), {}))
    assert [name for name, _ in parts] == [f"experts.{i}.up_proj.weight" for i in range(3)]
    assert [(part.shape, part.offset, part.num_bytes) for _, part in parts] == [
        ((4, 5), 1000 + 80 * i, 80) for i in range(3)
    ]


def test_the_parts_of_an_up_projection_belong_together() -> None:
    keys = tensor(2, 3, 4)
    _check_up_projection(keys, tensor(2, 5, 3))
    for values in (tensor(1, 5, 3), tensor(2, 5, 4), tensor(2, 3), None):
        with pytest.raises(WeightError, match=r"should be \[heads, rank, size\]"):
            _check_up_projection(keys, values)
    with pytest.raises(WeightError):
        _check_up_projection(tensor(2, 3), tensor(2, 5, 3))


def test_ministral_3_is_mistral_with_a_factor_for_queries() -> None:
    plain, scaled = ARCHITECTURES["mistral3"], _WITH_TEMPERATURE["mistral3"]
    assert scaled.scales_queries
    assert (scaled.layer, scaled.pairs) == (plain.layer, plain.pairs)
