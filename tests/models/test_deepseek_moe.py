"""The mixture of experts of DeepSeek and Kimi over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.checkpoints import prompt
from models.harness import ModelBench
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from atom.distributed.parallel_state import ParallelGroup
from atom.model_loader.errors import WeightError
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.moe import FusedMoE
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.quant.formats.online import OnlineConfig
from atom.model_ops.registry import OpTable
from atom.models.moe import deepseek_v2
from atom.models.moe.deepseek_v2 import DeepseekV3MoE
from atom.platform import Platform, cpu_platform

CONFIG = DeepseekV3Config(
    hidden_size=16,
    moe_intermediate_size=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
)

QUANTISED = DeepseekV3Config(**{**CONFIG.to_dict(), "hidden_size": 64, "moe_intermediate_size": 64})


def moe_of(rank: int, size: int) -> DeepseekV3MoE:
    """A rank alone: it has no others to sum with."""
    table = OpTable(cpu_platform(), OPS)
    group = ParallelGroup(rank, size)
    context = LayerContext(torch.float32, torch.device("cpu"), table, 8, group)
    return DeepseekV3MoE(CONFIG, context, "mlp")


@torch.no_grad()
def copy_share(whole: DeepseekV3MoE, part: DeepseekV3MoE) -> None:
    assert whole.shared_experts is not None
    assert part.shared_experts is not None
    part.gate.load_state_dict(whole.gate.state_dict())
    part.experts.load_weight("w13_weight", whole.experts.w13_weight, None)
    part.experts.load_weight("w2_weight", whole.experts.w2_weight, None)
    gate, up = whole.shared_experts.gate_up_proj.weight.chunk(2)
    part.shared_experts.gate_up_proj.load_weight("weight", gate, "gate_proj")
    part.shared_experts.gate_up_proj.load_weight("weight", up, "up_proj")
    part.shared_experts.down_proj.load_weight("weight", whole.shared_experts.down_proj.weight, None)


def joins_where_there_is_one(config: Any, *_: object) -> bool:
    """As on a GPU, where its weights are stored like the others'."""
    return config.n_shared_experts == 1


@pytest.mark.parametrize("size", [1, 2])
def test_a_shared_expert_among_the_routed_ones_adds_the_same(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = moe_of(0, 1)
    for parameter in whole.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    monkeypatch.setattr(deepseek_v2, "shared_expert_joins", joins_where_there_is_one)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    total = torch.zeros_like(x)
    for rank in range(size):
        part = moe_of(rank, size)
        assert part.shared_experts is None
        part.gate.load_state_dict(whole.gate.state_dict())
        load_joined(whole, part.experts)
        total += part(x)
    torch.testing.assert_close(total, whole(x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def load_joined(whole: DeepseekV3MoE, experts: FusedMoE) -> None:
    """Routed experts from a tensor of all, and the shared one from those of its own."""
    shared = whole.shared_experts
    assert shared is not None
    gate, up = shared.gate_up_proj.weight.chunk(2)
    own = {"gate_proj": gate, "up_proj": up, "down_proj": shared.down_proj.weight}
    tensors = {f"shared_experts.{name}.weight": weight for name, weight in own.items()}
    tensors |= {"gate_up_proj": whole.experts.w13_weight, "down_proj": whole.experts.w2_weight}
    filled = {"w13_weight": set[str](), "w2_weight": set[str]()}
    for name, tensor in tensors.items():
        placed = experts.place_weight(name)
        assert placed is not None
        parameter, shard = placed
        assert shard is not None
        assert experts.holds(shard)
        experts.load_weight(parameter, tensor, shard)
        covered = experts.covers(parameter, shard)
        assert not filled[parameter] & set(covered)
        filled[parameter] |= set(covered)
    assert all(filled[name] == set(experts.weight_shards(name)) for name in filled)


def quantised_moe(rank: int, size: int) -> DeepseekV3MoE:
    """Routed experts in int4, the rest as it is; experts by the op that takes that."""
    table = OpTable(
        cpu_platform(),
        {**OPS, "quant_experts": tuple(e for e in OPS["quant_experts"] if e.takes_plain)},
    )
    quant = OnlineConfig("int4", ("*.shared_experts",))
    group = ParallelGroup(rank, size)
    context = LayerContext(torch.float32, torch.device("cpu"), table, 8, group)
    return DeepseekV3MoE(QUANTISED, replace(context, quant=quant, activations="float"), "mlp")


@torch.no_grad()
def load_all(moe: DeepseekV3MoE, tensors: dict[str, torch.Tensor]) -> None:
    filled: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        placed = moe.experts.place_weight(name)
        if placed is None:
            _, part, stored = name.split(".")
            assert moe.shared_experts is not None
            down = part == "down_proj"
            layer = moe.shared_experts.down_proj if down else moe.shared_experts.gate_up_proj
            layer.load_weight(stored, tensor, None if down else part)
            continue
        parameter, shard = placed
        assert shard is not None
        assert moe.experts.holds(shard)
        moe.experts.load_weight(parameter, tensor, shard)
        filled.setdefault(parameter, set()).add(shard)
    assert all(filled[name] == set(moe.experts.weight_shards(name)) for name in filled)
    generator = torch.Generator().manual_seed(1)
    moe.gate.weight.normal_(generator=generator)
    assert moe.gate.e_score_correction_bias is not None
    moe.gate.e_score_correction_bias.zero_()
    moe.experts.process_after_loading()


@pytest.mark.parametrize("size", [1, 2])
def test_a_shared_expert_that_is_not_quantised_may_be_among_those_that_are(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    hidden, inter = QUANTISED.hidden_size, QUANTISED.moe_intermediate_size
    shapes = {
        "gate_proj": (inter, hidden),
        "up_proj": (inter, hidden),
        "down_proj": (hidden, inter),
    }
    tensors = {
        f"{expert}.{part}.weight": torch.randn(shape, generator=generator) / 8
        for expert in ["shared_experts", *map(str, range(8))]
        for part, shape in shapes.items()
    }
    apart = quantised_moe(0, 1)
    load_all(apart, tensors)
    x = torch.randn(5, hidden, generator=generator)
    monkeypatch.setattr(deepseek_v2, "shared_expert_joins", joins_where_there_is_one)
    total = torch.zeros_like(x)
    for rank in range(size):
        part = quantised_moe(rank, size)
        assert part.shared_experts is None
        assert part.experts.weight_shards("shared_w13_weight") == ("8.gate_proj", "8.up_proj")
        load_all(part, tensors)
        assert "shared_w13_weight" not in dict(part.experts.named_parameters())
        assert part.experts.quantised_bytes > 3 * inter // size * hidden * 4
        total += part(x)
    torch.testing.assert_close(total, apart(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [checkpoints.deepseek_v3, checkpoints.kimi_k25])
def test_a_checkpoint_loads_into_joined_experts(
    make: Callable[..., checkpoints.Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepseek_v2, "shared_expert_joins", joins_where_there_is_one)
    checkpoint, tokens = make(tmp_path), prompt(9)
    bench = ModelBench(tmp_path)
    assert bench.model.get_submodule("model.layers.1.mlp").shared_experts is None
    if isinstance(checkpoint.reference, DeepseekV3ForCausalLM):
        torch.testing.assert_close(
            bench.run(tokens, [9]), checkpoint.logits(tokens), atol=1e-4, rtol=0
        )
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    [lost, *_] = [name for name in tensors if "shared_experts.up_proj" in name]
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"w13_weight \(lacks 8\.up_proj\)"):
        ModelBench(tmp_path)


def test_when_a_shared_expert_joins() -> None:
    """It must be stored like the others or not quantised, of their size, and this rank's."""
    gpu = LayerContext.create(torch.bfloat16, 8, Platform("cuda", "sm90", True))
    joins = partial(deepseek_v2.shared_expert_joins, prefix="mlp")
    fp8 = replace(gpu, quant=OnlineConfig("fp8"))
    assert joins(CONFIG, gpu)
    assert joins(CONFIG, fp8)
    assert joins(CONFIG, replace(fp8, quant=OnlineConfig("fp8", ("mlp.shared_experts",))))
    assert not joins(CONFIG, replace(fp8, quant=OnlineConfig("fp8", ("mlp.experts",))))
    assert not joins(CONFIG, replace(gpu, experts=ParallelGroup(0, 2)))
    assert not joins(CONFIG, LayerContext.create(torch.bfloat16, 8, cpu_platform()))
    assert not joins(DeepseekV3Config(n_shared_experts=2), gpu)


def test_what_ranks_leave_to_sum_is_routed_and_shared_experts() -> None:
    whole = moe_of(0, 1)
    for parameter in whole.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    total = torch.zeros_like(x)
    for rank in range(2):
        part = moe_of(rank, 2)
        copy_share(whole, part)
        total += part(x)
    torch.testing.assert_close(total, whole(x), atol=1e-4, rtol=1e-4)
