"""Quantised checkpoints made from random codes, so that the weights are known without a quantiser.

A test's packer draws the codes and scales of one matrix, stores them by the rules of its format,
and computes the matrix from them in float64. `quantised` writes a checkpoint with the stored
tensors, and one with the matrices as plain numbers, which must be the same model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from models import checkpoints
from models.harness import ModelBench
from safetensors.torch import load_file, save_file

from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import ColumnParallelLinear, RowParallelLinear
from atom.model_ops.moe import FusedMoE
from atom.model_ops.quant.base import QuantConfig
from atom.platform import cpu_platform

TOKENS = checkpoints.prompt(12)


@dataclass(frozen=True)
class Packed:
    """Attributes:
    tensors: by their names in the module, such as `weight_packed`.
    weight: float64 [out, in], what they stand for.
    """

    tensors: Mapping[str, torch.Tensor]
    weight: torch.Tensor


# (module's name, out, in) -> None for a module that is not quantised.
Pack = Callable[[str, int, int], Packed | None]


def but_the_tower(pack: Pack) -> Pack:
    """Published checkpoints leave what makes rows of images as it is."""

    def packed(module: str, out: int, columns: int) -> Packed | None:
        is_tower = module.startswith(("vision_tower.", "mm_projector."))
        return None if is_tower else pack(module, out, columns)

    return packed


def quantised(folder: Path, config: Mapping[str, Any], pack: Pack) -> tuple[Path, Path]:
    """Replace the matrices of a checkpoint -> its quantised form, and the same model in numbers.

    Embeddings are never quantised; `pack` decides for everything else with two dimensions.
    """
    stored, dense = folder.with_name("quantised"), folder.with_name("dense")
    plain = load_file(folder / "model.safetensors")
    numbers, tensors = dict(plain), dict(plain)
    for name, tensor in plain.items():
        module, _, parameter = name.rpartition(".")
        if tensor.dim() != 2 or parameter != "weight" or "embed" in name:
            continue
        packed = pack(module, *tensor.shape)
        if packed is None:
            continue
        assert packed.weight.shape == tensor.shape
        numbers[name] = packed.weight.float()
        del tensors[name]
        for part, values in packed.tensors.items():
            tensors[f"{module}.{part}"] = values.contiguous().clone()
    for target, content in ((stored, tensors), (dense, numbers)):
        shutil.copytree(folder, target)
        save_file(content, target / "model.safetensors", metadata={"format": "pt"})
    checkpoints.edit_config(stored, quantization_config=dict(config))
    return stored, dense


def logits(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
    """[T, vocab] of `TOKENS`, chunked: a long step and single ones."""
    return ModelBench(folder, dtype=dtype, **options).run(TOKENS, [5, 1])


def assert_same_model(stored: Path, dense: Path) -> None:
    """Weight-only formats in float32: equal to rounding, and far from a model without weights."""
    expected = logits(dense)
    assert expected.std() > 0.01
    torch.testing.assert_close(logits(stored), expected, rtol=1e-4, atol=1e-4)


def layer_context(
    config: QuantConfig, group: ParallelGroup, dtype: torch.dtype = torch.float32
) -> LayerContext:
    context = LayerContext.create(dtype, 8, cpu_platform())
    return replace(context, quant=config, group=group)


def split_products(
    config: QuantConfig, tensors: Mapping[str, torch.Tensor], x: torch.Tensor, out: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix' product with x [T, in], by `size` ranks that split its outputs, or its inputs.

    Rank by rank, without communication: outputs are put side by side, partial sums added.
    """
    columns, rows = [], []
    step = x.shape[1] // size
    for rank in range(size):
        context = layer_context(config, ParallelGroup(rank, size))
        column = ColumnParallelLinear(x.shape[1], out, False, context, "a.o_proj")
        row = RowParallelLinear(x.shape[1], out, False, context, "a.o_proj")
        for layer in (column, row):
            for name, tensor in tensors.items():
                layer.load_weight(name, tensor, None)
            layer.process_after_loading()
        columns.append(column(x))
        rows.append(row(x[:, rank * step : (rank + 1) * step]))
    return torch.cat(columns, dim=1), torch.stack(rows).sum(dim=0)


def check_experts(config: QuantConfig, pack: Callable[[int, int], Packed]) -> None:
    """Three experts, loaded tensor by tensor, have their own weights."""
    with patch.dict(os.environ, {"ATOM_OP_QUANT_EXPERTS": "torch"}):  # which dequantises them
        layer = FusedMoE(3, 2, 64, 32, layer_context(config, SINGLE), "m.experts")
    expected: dict[str, list[torch.Tensor]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for name, weights in expected.items():
        for expert in range(3):
            packed = pack(64, 32) if name == "down_proj" else pack(32, 64)
            weights.append(packed.weight.float())
            for tensor, values in packed.tensors.items():
                placed = layer.place_weight(f"{expert}.{name}.{tensor}")
                assert placed is not None
                layer.load_weight(placed[0], values, placed[1])
    layer.process_after_loading()
    assert layer._prepared is not None
    w13, w2 = (prepared.weight for prepared in layer._prepared)
    gate, up, down = (torch.stack(weights) for weights in expected.values())
    torch.testing.assert_close(w13, torch.cat((gate, up), dim=1), rtol=3e-7, atol=0)
    torch.testing.assert_close(w2, down, rtol=3e-7, atol=0)
