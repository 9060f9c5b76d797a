"""The mixture of experts of DeepSeek and Kimi over several ranks."""

from __future__ import annotations

import torch
from transformers import DeepseekV3Config

from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.ops import OPS
from atom.model_ops.registry import OpTable
from atom.models.deepseek_v2 import DeepseekV3MoE
from atom.platform import cpu_platform

CONFIG = DeepseekV3Config(
    hidden_size=16,
    moe_intermediate_size=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
)


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
