"""Routing and experts against a plain reading, one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.kernels.torch.moe import moe_experts, moe_route
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.moe import FusedMoE, TopKRouter
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpTable
from atom.model_ops.routing import Routing
from atom.platform import cpu_platform

EXPERTS, HIDDEN, INTER = 6, 10, 7


def context(group: ParallelGroup | None = None) -> LayerContext:
    table = OpTable(cpu_platform(), OPS)
    return LayerContext(torch.float32, torch.device("cpu"), table, 8, group or ParallelGroup())


def route_one(logits: list[float], bias: list[float] | None, r: Routing) -> dict[int, float]:
    """Expert -> weight for one token, by the papers."""
    row = torch.tensor(logits, dtype=torch.float64)
    scores = (row.softmax(0) if r.scoring == "softmax" else row.sigmoid()).tolist()
    choice = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    groups = [list(range(g * r.group_size, (g + 1) * r.group_size)) for g in range(r.num_groups)]
    taken = 1 if r.group_score == "max" else 2

    def worth(group: list[int]) -> float:
        return sum(sorted((choice[e] for e in group), reverse=True)[:taken])

    best = sorted(groups, key=worth, reverse=True)[: r.top_groups]
    eligible = [e for group in best for e in group]
    chosen = sorted(eligible, key=lambda e: choice[e], reverse=True)[: r.top_k]
    total = sum(scores[e] for e in chosen) if r.renormalize else 1.0
    return {e: scores[e] / total * r.scaling for e in chosen}


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["softmax", "sigmoid"]),
    st.sampled_from(["max", "top2_sum"]),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 3), (4, 4)]),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_routing_equals_the_definition(
    seed: int,
    scoring: str,
    group_score: str,
    groups: tuple[int, int],
    top_k: int,
    renormalize: bool,
    biased: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    routing = Routing(16, top_k, scoring, *groups, group_score, renormalize, 2.5)
    logits = torch.randn(5, 16, generator=generator)
    bias = torch.randn(16, generator=generator) if biased else None
    weights, ids = moe_route(logits, bias, routing)
    assert weights.dtype == torch.float32
    for row in range(5):
        expected = route_one(logits[row].tolist(), None if bias is None else bias.tolist(), routing)
        found = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scoring": "tanh"}, "softmax, sigmoid; got 'tanh'"),
        ({"group_score": "mean"}, "got 'mean'"),
        ({"num_groups": 4}, "6 experts do not split into n_group=4"),
        ({"num_groups": 3, "top_groups": 4}, "topk_group=4 must be 1 to n_group=3"),
        ({"num_groups": 3, "top_groups": 1, "top_k": 3}, "num_experts_per_tok=3 must be 1 to 2"),
        ({"top_k": 7}, "num_experts_per_tok=7 must be 1 to 6"),
        ({"num_groups": 6, "top_groups": 6, "group_score": "top2_sum"}, "leaves 1 in a group"),
    ],
)
def test_contradictory_routing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Routing(**{"num_experts": EXPERTS, "top_k": 2, "scoring": "sigmoid", **fields})


def test_the_router_computes_in_float32() -> None:
    half = LayerContext(torch.bfloat16, torch.device("cpu"), OpTable(cpu_platform(), OPS), 8)
    router = TopKRouter(HIDDEN, Routing(EXPERTS, 2, "sigmoid"), True, half)
    assert router.e_score_correction_bias is not None
    router.weight.data.normal_()
    router.e_score_correction_bias.data.zero_()
    x = torch.randn(3, HIDDEN, dtype=torch.bfloat16)
    weights, ids = router(x)
    assert router.weight.dtype is torch.bfloat16
    expected = (x.float() @ router.weight.float().T).sigmoid().topk(2)
    assert torch.equal(ids.sort().values, expected.indices.sort().values)
    torch.testing.assert_close(weights.sum(1), expected.values.sum(1))


def experts_by_definition(
    x: torch.Tensor, moe: FusedMoE, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            gate, up = (moe.w13_weight[e] @ x[t]).chunk(2)
            out[t] += weight * (moe.w2_weight[e] @ (F.silu(gate) * up))
    return out


@torch.no_grad()
def filled_moe() -> FusedMoE:
    moe = FusedMoE(EXPERTS, 2, HIDDEN, INTER, context(), "experts")
    generator = torch.Generator().manual_seed(0)
    for parameter in moe.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return moe


def random_visits(num_tokens: int, seed: int, experts: int = EXPERTS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(num_tokens)])
    return x, torch.rand(num_tokens, 2, generator=generator), ids


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 33])
@pytest.mark.parametrize("experts", [2, EXPERTS])
def test_experts_equal_the_definition(num_tokens: int, experts: int) -> None:
    moe = filled_moe()
    x, weights, ids = random_visits(num_tokens, num_tokens, experts)
    expected = experts_by_definition(x, moe, weights, ids)
    torch.testing.assert_close(moe(x, weights, ids), expected, atol=1e-5, rtol=1e-5)


def test_experts_in_bfloat16_keep_their_type() -> None:
    moe = filled_moe()
    x, weights, ids = random_visits(5, 0)
    run = moe_experts
    args = (x.bfloat16(), moe.w13_weight.bfloat16(), moe.w2_weight.bfloat16(), weights, ids)
    out = run(*args)
    assert out.dtype == torch.bfloat16
    expected = experts_by_definition(x, moe, weights, ids)
    assert (out.float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert run(args[0][:1], *args[1:3], weights[:1], ids[:1]).dtype == torch.bfloat16


class TestLoading:
    def test_one_tensor_per_matrix(self) -> None:
        source = filled_moe()
        moe = FusedMoE(EXPERTS, 2, HIDDEN, INTER, context(), "experts")
        for e in range(EXPERTS):
            matrices = {
                "gate_proj": source.w13_weight[e, :INTER],
                "up_proj": source.w13_weight[e, INTER:],
                "down_proj": source.w2_weight[e],
            }
            for part, matrix in matrices.items():
                placed = moe.place_weight(f"{e}.{part}.weight")
                assert placed is not None
                moe.load_weight(placed[0], matrix, placed[1])
        assert torch.equal(moe.w13_weight, source.w13_weight)
        assert torch.equal(moe.w2_weight, source.w2_weight)

    def test_all_experts_in_one_tensor(self) -> None:
        source = filled_moe()
        moe = FusedMoE(EXPERTS, 2, HIDDEN, INTER, context(), "experts")
        for name, tensor in {
            "gate_up_proj": source.w13_weight,
            "down_proj": source.w2_weight,
        }.items():
            placed = moe.place_weight(name)
            assert placed is not None
            moe.load_weight(placed[0], tensor, placed[1])
        assert torch.equal(moe.w13_weight, source.w13_weight)
        assert torch.equal(moe.w2_weight, source.w2_weight)

    def test_every_matrix_is_asked_for(self) -> None:
        moe = FusedMoE(3, 2, HIDDEN, INTER, context(), "experts")
        assert moe.weight_shards("w13_weight") == tuple(
            f"{i}.{part}" for i in range(3) for part in ("gate_proj", "up_proj")
        )
        assert moe.weight_shards("w2_weight") == ("0.down_proj", "1.down_proj", "2.down_proj")

    @pytest.mark.parametrize(
        "name",
        ["6.gate_proj.weight", "0.gate_proj.bias", "0.w1.weight", "gate_proj", "-1.up_proj.weight"],
    )
    def test_unknown_names_have_no_place(self, name: str) -> None:
        assert FusedMoE(EXPERTS, 2, HIDDEN, INTER, context(), "experts").place_weight(name) is None

    def test_a_wrong_shape_is_refused(self) -> None:
        moe = FusedMoE(EXPERTS, 2, HIDDEN, INTER, context(), "experts")
        with pytest.raises(ValueError, match=r"\[7, 9\].*\[7, 10\]"):
            moe.load_weight("w13_weight", torch.zeros(INTER, 9), "0.up_proj")

    def test_ranks_share_the_intermediate_dimension(self) -> None:
        """Their outputs sum to the whole, whichever spelling the checkpoint has."""
        whole = FusedMoE(EXPERTS, 2, HIDDEN, 8, context(), "experts")
        for parameter in whole.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(3))
        x, weights, ids = random_visits(4, 1)
        for stacked in (True, False):
            total = torch.zeros_like(x)
            for rank in range(2):
                # A rank's layers alone; nothing is communicated.
                share = FusedMoE(EXPERTS, 2, HIDDEN, 8, context(ParallelGroup(rank, 2)), "experts")
                _copy(whole, share, stacked)
                total += share(x, weights, ids)
            torch.testing.assert_close(total, whole(x, weights, ids), atol=1e-4, rtol=1e-4)


def _copy(source: FusedMoE, target: FusedMoE, stacked: bool) -> None:
    if stacked:
        target.load_weight("w13_weight", source.w13_weight.data, None)
        target.load_weight("w2_weight", source.w2_weight.data, None)
        return
    for e in range(EXPERTS):
        gate, up = source.w13_weight.data[e].chunk(2)
        target.load_weight("w13_weight", gate, f"{e}.gate_proj")
        target.load_weight("w13_weight", up, f"{e}.up_proj")
        target.load_weight("w2_weight", source.w2_weight.data[e], f"{e}.down_proj")
