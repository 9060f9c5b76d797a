"""aiter's routing and experts against float64 references: over the fake, and over aiter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from aiter_cases import BF16, Aiter, check, random
from fake_aiter import FakeAiter
from fake_aiter_layouts import weight_places

from atom.model_ops.kernels import probe
from atom.model_ops.kernels.aiter.moe import moe_experts, prepare_experts
from atom.model_ops.registry import OpUnavailableError
from atom.model_ops.routing import Routing

ROUTINGS = {
    "kimi": (Routing(384, 8, "sigmoid", 1, 1, "top2_sum", True, 2.827), True),
    "deepseek v3": (Routing(256, 8, "sigmoid", 8, 4, "top2_sum", True, 2.5), True),
    "deepseek v2": (Routing(64, 6, "softmax", 8, 3, "max", False, 16.0), False),
    "softmax": (Routing(64, 6, "softmax", renormalize=True), False),
    "softmax as it is": (Routing(64, 6, "softmax", scaling=2.0), False),
    "sigmoid": (Routing(64, 2, "sigmoid"), False),
    "pairs without a bias": (Routing(64, 4, "sigmoid", 4, 2, "top2_sum", True), False),
}


def routing_shape(routing: Routing, has_bias: bool) -> dict[str, int]:
    return {
        "num_experts": routing.num_experts,
        "top_k": routing.top_k,
        "num_groups": routing.num_groups,
        "softmax": routing.scoring == "softmax",
        "pair_scores": routing.group_score == "top2_sum",
        "has_bias": has_bias,
        "has_shared": routing.has_shared,
    }


@pytest.mark.parametrize("name", ROUTINGS)
def test_moe_route(aiter: Aiter, name: str) -> None:
    routing, has_bias = ROUTINGS[name]
    route = aiter.ops.resolve("moe_route", torch.float32, **routing_shape(routing, has_bias))
    logits = random(aiter, 17, routing.num_experts, dtype=torch.float32)
    bias = random(aiter, routing.num_experts, seed=1, dtype=torch.float32).abs() * 0.3
    weights, ids = route(logits, bias if has_bias else None, routing)
    scores = (
        logits.double().softmax(-1) if routing.scoring == "softmax" else logits.double().sigmoid()
    )
    choice = scores + bias.double() if has_bias else scores
    grouped = choice.view(17, routing.num_groups, -1)
    judges = 2 if routing.group_score == "top2_sum" else 1
    best = grouped.topk(judges).values.sum(-1).topk(routing.top_groups).indices
    mask = torch.zeros(17, routing.num_groups, device=aiter.device).scatter_(1, best, 1).bool()
    choice = grouped.masked_fill(~mask[..., None], -torch.inf).flatten(1)
    wanted_ids = choice.topk(routing.top_k).indices.sort().values
    kept = scores.gather(1, wanted_ids)
    if routing.renormalize:
        kept = kept / kept.sum(-1, keepdim=True)
    ids, order = ids.sort()
    assert ids.dtype == torch.int32
    assert torch.equal(ids, wanted_ids)
    check(weights.gather(1, order), kept * routing.scaling, 1e-5)


@pytest.mark.parametrize(
    ("routing", "has_bias", "reason"),
    [
        (Routing(64, 4, "softmax"), True, "correction bias"),
        (Routing(64, 4, "softmax", 4, 2, "top2_sum"), False, "two best"),
        (Routing(64, 4, "sigmoid", 4, 2, "max"), True, "their best"),
        (Routing(64, 4, "sigmoid", 16, 2), False, "num_groups=16"),
    ],
)
def test_routings_that_aiter_has_not(
    aiter: Aiter, routing: Routing, has_bias: bool, reason: str
) -> None:
    with pytest.raises(OpUnavailableError, match=reason):
        aiter.ops.resolve("moe_route", torch.float32, **routing_shape(routing, has_bias))


SIZES = {"num_experts": 8, "top_k": 3, "elsewhere": 0}
SIZES |= {"hidden_size": 256, "intermediate_size": 128}


def expert_weights(aiter: Aiter) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 and w2 as a checkpoint has them."""
    return random(aiter, 8, 256, 256, seed=1) / 16, random(aiter, 8, 256, 128, seed=2) / 8


def test_moe_experts(aiter: Aiter) -> None:
    experts = aiter.ops.resolve("moe_experts", BF16, **SIZES)
    w13, w2 = expert_weights(aiter)
    prepared = prepare_experts(w13.clone(), w2.clone())
    for tokens in (1, 37):
        x = random(aiter, tokens, 256, seed=3)
        ids = torch.stack([torch.randperm(8)[:3] for _ in range(tokens)]).to(aiter.device)
        weights = torch.rand(tokens, 3, device=aiter.device)
        wanted = torch.zeros(tokens, 256, dtype=torch.float64, device=aiter.device)
        for token in range(tokens):
            for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
                gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
                wanted[token] += weight * (w2[expert].double() @ (F.silu(gate) * up))
        check(experts(x, *prepared, weights, ids), wanted, 2**-5)
    aiter.called("shuffle_weight", "fused_moe")


def test_experts_elsewhere_add_nothing(aiter: Aiter) -> None:
    experts = aiter.ops.resolve("moe_experts", BF16, **SIZES)
    prepared = prepare_experts(*expert_weights(aiter))
    x, ids = random(aiter, 3, 256, seed=3), torch.tensor([[1, 8], [8, 8], [8, 7]]).to(aiter.device)
    out = experts(x, *prepared, torch.ones(3, 2, device=aiter.device), ids, 24)
    here = torch.tensor([[1], [0], [7]], device=aiter.device)
    alone = experts(x, *prepared, torch.ones(3, 1, device=aiter.device), here)
    check(out[0::2], alone[0::2].double(), 2**-8)
    assert not out[1].any()


def test_weights_are_shuffled_in_place_and_marked(aiter: Aiter) -> None:
    before = expert_weights(aiter)
    parameters = [torch.nn.Parameter(w.clone(), requires_grad=False) for w in before]
    for given, weight, prepared in zip(
        before, parameters, prepare_experts(*parameters), strict=True
    ):
        assert prepared is weight
        assert prepared.is_shuffled
        places = weight_places(*weight.shape[1:], 2).to(aiter.device)
        assert not torch.equal(prepared, given)
        assert torch.equal(prepared.flatten(1)[:, places], given)


def test_row_major_weights_are_an_error_and_would_give_garbage() -> None:
    x, ids = torch.ones(1, 256, dtype=BF16), torch.zeros(1, 1, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(1, 256, n, generator=generator).to(BF16) / 16 for n in (256, 128))
    outs = []
    with probe.replaced(FakeAiter().library):
        with pytest.raises(RuntimeError, match="aiter's experts need weights from `prepare`"):
            moe_experts(x, w13, w2, torch.ones(1, 1), ids)
        outs = [moe_experts(x, *prepare_experts(w13.clone(), w2.clone()), torch.ones(1, 1), ids)]
        w13.is_shuffled = w2.is_shuffled = True
        outs.append(moe_experts(x, w13, w2, torch.ones(1, 1), ids))
    assert (outs[0] - outs[1]).abs().max() > outs[0].abs().max() / 2


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"hidden_size": 96}, "hidden_size=96 is no multiple of 64"),
        ({"intermediate_size": 72}, "intermediate_size=72 is no multiple of 64"),
    ],
)
def test_sizes_of_experts_that_aiter_has_not(
    aiter: Aiter, sizes: dict[str, int], reason: str
) -> None:
    with pytest.raises(OpUnavailableError, match=reason):
        aiter.ops.resolve("moe_experts", BF16, **{**SIZES, **sizes})


def test_weights_that_cannot_be_shuffled() -> None:
    with pytest.raises(ValueError, match="tiles of 16 x 32, not weights of 24 x 48"):
        prepare_experts(torch.zeros(2, 24, 48), torch.zeros(2, 48, 12))
