"""`quant_method: mxfp4`: all experts in one tensor, as gpt-oss stores them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from quantised.packing import assert_same_model, layer_context, logits
from quantised.writers import E2M1, exponents, over_groups, pack_pairs, powers, random_codes
from safetensors.torch import load_file, save_file

from atom.distributed.parallel_state import ParallelGroup
from atom.model_loader.errors import WeightError
from atom.model_ops.moe import FusedMoE
from atom.model_ops.quant.formats.table import parse_quantization

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.self_attn"]}
EXPERTS, HIDDEN, INTER = 3, 64, 64


def pack(
    num_experts: int, hidden: int, inter: int
) -> tuple[Mapping[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The tensors of a layer, and each expert's matrices by name, float64."""
    tensors: dict[str, torch.Tensor] = {}
    matrices: list[dict[str, torch.Tensor]] = [{} for _ in range(num_experts)]
    for name, out, columns in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
        codes = random_codes(num_experts * out, columns).view(num_experts, out, columns)
        scale = exponents(num_experts * out, columns // 32).view(num_experts, out, -1)
        blocks = pack_pairs(codes).view(num_experts, out, columns // 32, 16)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scale}
        weight = E2M1[codes] * over_groups(powers(scale), 32, columns)
        for expert, matrix in zip(matrices, weight, strict=True):
            if name == "down_proj":
                expert[name] = matrix
            else:
                expert["gate_proj"], expert["up_proj"] = matrix[0::2], matrix[1::2]
    return tensors, matrices


def write_kimi(folder: Path, **more: torch.Tensor) -> tuple[Path, Path]:
    """A Kimi checkpoint whose experts are stored so, and its twin in numbers."""
    fields = {"num_hidden_layers": 2, "hidden_size": HIDDEN, "moe_intermediate_size": 32}
    plain = checkpoints.kimi_k25(folder / "plain", **fields, n_routed_experts=4).folder
    tensors = load_file(plain / "model.safetensors")
    prefix = "language_model.model.layers.1.mlp.experts"
    stored, matrices = pack(4, HIDDEN, 32)
    for i, expert in enumerate(matrices):
        for name, matrix in expert.items():
            tensors[f"{prefix}.{i}.{name}.weight"] = matrix.float().contiguous()
    dense = plain.rename(folder / "dense")
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    quantised = checkpoints.kimi_k25(folder / "quantised", **fields, n_routed_experts=4).folder
    kept = {name: t for name, t in tensors.items() if not name.startswith(prefix)}
    kept |= {f"{prefix}.{name}": t for name, t in {**stored, **more}.items()}
    save_file(kept, quantised / "model.safetensors", metadata={"format": "pt"})
    checkpoints.edit_config(quantised, quantization_config=CONFIG)
    return quantised, dense


def test_a_model(tmp_path: Path) -> None:
    assert_same_model(*write_kimi(tmp_path))


def test_biases_of_experts_without_any_are_refused(tmp_path: Path) -> None:
    stored, _ = write_kimi(tmp_path, gate_up_proj_bias=torch.zeros(4, 64))
    message = r"unexpected.*layers\.1\.mlp\.experts\.gate_up_proj_bias"
    with pytest.raises(WeightError, match=message):
        logits(stored)


def experts(tensors: Mapping[str, torch.Tensor], group: ParallelGroup) -> FusedMoE:
    context = layer_context(parse_quantization(CONFIG, {}), group)
    layer = FusedMoE(EXPERTS, 2, HIDDEN, INTER, context, "model.layers.1.mlp.experts")
    for name, tensor in tensors.items():
        placed = layer.place_weight(name)
        assert placed is not None
        layer.load_weight(placed[0], tensor, placed[1])
    layer.process_after_loading()
    return layer


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_have_the_products(size: int) -> None:
    tensors, matrices = pack(EXPERTS, HIDDEN, INTER)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, HIDDEN, generator=generator)
    weights = torch.rand(5, 2, generator=generator)
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1], [0, 2]])
    parts = [experts(tensors, ParallelGroup(rank, size))(x, weights, ids) for rank in range(size)]
    expected = torch.zeros(5, HIDDEN).double()
    for row, (chosen, factors) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
        for expert, factor in zip(chosen, factors, strict=True):
            of = matrices[expert]
            gate, up = (of[name] @ x[row].double() for name in ("gate_proj", "up_proj"))
            expected[row] += factor * (of["down_proj"] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(torch.stack(parts).sum(0).double(), expected, rtol=1e-4, atol=1e-3)


def test_ranks_that_would_cut_a_group() -> None:
    with pytest.raises(ValueError, match=r"groups of 32 inputs.* 0\.\.16 of 64 would cut"):
        experts({}, ParallelGroup(0, 4))


def test_other_layers_are_not_quantised() -> None:
    config: dict[str, Any] = {**CONFIG, "modules_to_not_convert": ["model.layers.2.mlp"]}
    parsed = parse_quantization(config, {})
    assert parsed.method_for("model.layers.1.self_attn.o_proj") is None
    assert parsed.method_for("model.layers.1.mlp.experts", kind="experts") is not None
    assert parsed.method_for("model.layers.2.mlp.experts", kind="experts") is None
