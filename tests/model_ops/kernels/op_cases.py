"""A small case of each op that needs no cache: arguments, and how near results must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from atom.model_ops.attention.metadata import SamplingMetadata, StateMetadata
from atom.model_ops.gates import ClampedGate, SituGate
from atom.model_ops.kernels.torch.carried import CarriedInputs, CarriedTokens
from atom.model_ops.routing import Routing

BF16 = torch.bfloat16
# Results in bfloat16, of the largest.
ROUNDED = 2**-6


@dataclass(frozen=True)
class OpCase:
    """Attributes:
    arguments: on the CPU.
    shape: as a layer asks for it.
    tolerance: of the largest number; 0 where all are the same.
    writes: to some of its arguments, which are compared, too.
    """

    op: str
    arguments: tuple[Any, ...]
    shape: dict[str, int] = field(default_factory=dict)
    dtype: torch.dtype = BF16
    tolerance: float = 0.0
    writes: bool = False


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def to(value: Any, device: torch.device) -> Any:
    """A copy of tensors, and of all that holds any."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    if is_dataclass(value) and not isinstance(value, (type, Routing)):
        moved = {f.name: to(getattr(value, f.name), device) for f in fields(value) if f.init}
        return replace(value, **moved)
    return value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All that a result, or an argument that was written to, holds."""
    if isinstance(value, torch.Tensor):
        yield value.cpu()
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors(part)
    elif is_dataclass(value):
        for part in fields(value):
            yield from tensors(getattr(value, part.name))


def _elementwise() -> list[OpCase]:
    x, y, weight = random(5, 256), random(5, 256, seed=1), random(256, seed=2)
    angles = torch.rand(40, 64) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    turned = integers(40, 5), random(5, 4, 128), random(5, 2, 128, seed=1), cos_sin, False
    mixed = random(3, 5, 256, seed=8), x, weight, random(1, 256, seed=9) / 8, 1e-5
    return [
        OpCase("rms_norm", (x, weight, 1e-5), {"size": 256}, tolerance=ROUNDED),
        OpCase("layer_norm", (x, weight, 1e-5), {"size": 256}, tolerance=ROUNDED),
        OpCase("layer_norm", (x, weight, 1e-5, y[0]), {"size": 256}, tolerance=ROUNDED),
        OpCase("add_rms_norm", (x, y, weight, 1e-5), {"size": 256}, tolerance=2 * ROUNDED),
        OpCase("silu_and_mul", (random(5, 512),), {"size": 256}, tolerance=ROUNDED),
        OpCase("gelu_and_mul", (random(5, 512),), {"size": 256}, tolerance=ROUNDED),
        OpCase("situ_and_mul", (random(5, 512) * 3, 4.0, 25.0), {"size": 256}, tolerance=ROUNDED),
        OpCase("mix_residuals", mixed, {"size": 256}, tolerance=ROUNDED),
        OpCase("add", (x, y), tolerance=ROUNDED, writes=True),
        OpCase("scale", (x, 0.3), tolerance=ROUNDED, writes=True),
        OpCase("softcap", (x, 0.7), tolerance=2 * ROUNDED, writes=True),
        OpCase("mul_sigmoid", (x, random(5, 1, seed=6)), tolerance=2 * ROUNDED, writes=True),
        OpCase(
            "scale_by_position",
            (random(5, 4, 128), integers(40, 5), random(40, seed=7).float()),
            tolerance=ROUNDED,
            writes=True,
        ),
        OpCase("sigmoid", (random(7).float(),), dtype=torch.float32, tolerance=1e-6),
        OpCase("rope", turned, {"head_dim": 128}, tolerance=ROUNDED),
    ]


def _products() -> list[OpCase]:
    x, weight, bias = random(5, 256), random(96, 256, seed=1), random(96, seed=2)
    sizes = {"in_features": 256, "out_features": 96}
    wide, wide_sizes = random(1000, 256, seed=5), {"in_features": 256, "out_features": 1000}
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(5)])
    gates = torch.rand(5, 2)
    experts = random(5, 128), random(8, 256, 128, seed=3) / 8, random(8, 128, 128, seed=4) / 8
    biases = random(8, 256, seed=7), random(8, 128, seed=8)
    routed = *experts, gates, ids, 0
    biased, situ = (*routed, ClampedGate(1.702, 1.5), biases), (*routed, SituGate(4.0, 25.0))
    layer = {"num_experts": 8, "top_k": 2, "elsewhere": 0}
    layer |= {"hidden_size": 128, "intermediate_size": 128}
    return [
        OpCase("linear", (x, weight, bias), sizes, tolerance=ROUNDED),
        OpCase("linear", (x[:3], wide, None), wide_sizes, tolerance=ROUNDED),
        OpCase("logits", (x, weight), sizes, tolerance=1e-3),
        OpCase("embedding", (integers(96, 7), weight)),
        OpCase("moe_experts", biased, layer | {"clamped": 1}, tolerance=2 * ROUNDED),
        OpCase("moe_experts", routed, layer, tolerance=2 * ROUNDED),
        OpCase("moe_experts", situ, layer | {"situ": 1}, tolerance=2 * ROUNDED),
    ]


def _routings() -> list[OpCase]:
    logits, bias = random(5, 16, dtype=torch.float32), random(16, seed=1, dtype=torch.float32)
    cases = []
    for routing, given in (
        (Routing(16, 4, "softmax", renormalize=True), None),
        (Routing(16, 4, "sigmoid", 4, 2, "top2_sum", True, 2.5), bias / 10),
    ):
        shape = {"num_experts": 16, "top_k": 4, "num_groups": routing.num_groups}
        shape |= {"softmax": int(routing.scoring == "softmax"), "has_bias": int(given is not None)}
        shape |= {"pair_scores": int(routing.group_score == "top2_sum")}
        arguments = logits, given, routing
        cases.append(OpCase("moe_route", arguments, shape, torch.float32, tolerance=1e-3))
    return cases


def _sampling() -> list[OpCase]:
    scores = random(4, 300, dtype=torch.float32) * 3
    race = SamplingMetadata(
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.3]),
        top_k=torch.tensor([300, 20, 300, 5], dtype=torch.int32),
        top_p=torch.tensor([1.0, 0.9, 0.8, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.05, 0.0]),
        seeds=torch.tensor([1, 2, 3, 4]),
        positions=torch.tensor([5, 6, 7, 8]),
    )
    words = integers(2**31, 2, 10).int() | 1
    masked = scores, words, torch.tensor([3, 1])
    sizes = {"vocab_size": 300}
    slots = torch.tensor([0, 23, -1, 7])
    angles = random(30, 6, dtype=torch.float32), integers(20, 5)
    options = random(5, 6, dtype=torch.float32), integers(99, 6), torch.tensor([4, 0, 2])
    return [
        OpCase("argmax", (scores,), sizes, torch.float32),
        OpCase("argmax", (scores, integers(9999, 300)), sizes, torch.float32),
        OpCase("largest_pair", (scores, 70), sizes, torch.float32),
        OpCase("largest_of_pairs", (integers(2**20, 3, 4, 2).int(), None, True), {"num_ranks": 3}),
        OpCase("mask_tokens", masked, sizes, torch.float32, writes=True),
        OpCase("choose_tokens", (scores, SamplingMetadata()), sizes, torch.float32),
        OpCase("choose_tokens", (scores, race), sizes, torch.float32),
        OpCase("choose_drafts", (scores, race, None, 0.8, 2, False), sizes, torch.float32),
        OpCase("sampling_options", options, {}, torch.float32),
        OpCase("window_places", (integers(9, 6).int(), integers(6, 2, 3).int(), slots, 4)),
        OpCase("sampling_options", (*options, 3), {}, torch.float32),
        OpCase("mrope_table", (*angles, integers(4, 5, 3), integers(3, 6)), {}, torch.float32),
    ]


def _steps() -> list[OpCase]:
    """Three sequences: two drafts, of which one is right; none; one, which is right."""
    sampled = torch.tensor([7, 8, 9, 4, 5, 6])
    drafts = torch.tensor([[7, 3], [-2, -2], [5, -2]])
    table = torch.tensor([[0, 1, 2], [3, 3, 3], [4, 5, 5]])
    positions = torch.tensor([3, 15, 20])
    blocks = torch.tensor([[4, 2, 9], [1, 3, 0], [7, 0, 0]], dtype=torch.int32)
    counts = torch.tensor([3, 2, 1], dtype=torch.int32)
    place = torch.full((6,), -9), torch.arange(6), sampled, torch.tensor([1, 0, 1]), table
    row, after = torch.tensor([[1], [0], [0], [0], [0], [1]]), torch.tensor([[1, 2], [0, 4]])
    carried = CarriedTokens(integers(99, 3, 3), torch.tensor([4, 6, 8]))
    blank = [torch.full((4,), -9) for _ in range(3)]
    inputs = CarriedInputs(*blank, torch.full((2,), -9, dtype=torch.int32), None, None, None)
    left = carried, after, sampled.view(2, 3), torch.tensor([1, 2]), torch.arange(20, 26), None
    return [
        OpCase("verify_drafts", (sampled, drafts, table)),
        OpCase("verify_drafts", (sampled[:3], None, None)),
        OpCase("verify_drafts", (sampled, integers(3, 2, 3)[:, 1:], None, integers(2, 2))),
        OpCase("place_samples", place, writes=True),
        OpCase("place_drafts", (integers(99, 3), positions, blocks, counts, 1, 4, 98, 8, 24)),
        OpCase(
            "take_carried", (carried, inputs, row, 1, blocks, 8), dtype=torch.float32, writes=True
        ),
        OpCase("leave_carried", left, dtype=torch.float32, writes=True),
    ]


def _recurrent() -> list[OpCase]:
    """Three sequences, of which one begins, and one goes on and has a token of padding."""
    metadata = StateMetadata(
        rows=torch.tensor([2, 0, 3]),
        context_lens=torch.tensor([4, 12, 4], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 4, 6, 9], dtype=torch.int32),
        padding_lens=torch.tensor([0, 0, 1], dtype=torch.int32),
        query_lens_cpu=(4, 2, 3),
    )
    heads, sizes = (9, 4), {"num_key_heads": 2, "num_heads": 4, "key_dim": 32, "value_dim": 16}
    q, k, v = (random(9, n, size, seed=n + i) for i, (n, size) in enumerate(_SIZES_OF_HEADS))
    beta = torch.rand(*heads)
    conv = random(9, 48), random(48, 4, seed=1), random(5, 7, 48, seed=2), metadata
    rules = [
        (q, k, v, -torch.rand(*heads, n), beta, torch.randn(5, 3, 4, 32, 16), metadata)
        for n in (1, 32)
    ]
    rules.append((*rules[0][:5], torch.randn(5, 3, 4, 32, 16).bfloat16(), metadata))
    gates = [
        (random(9, 4, n), random(*heads, seed=1), torch.randn(4), torch.randn(4, n), bound)
        for n, bound in ((1, None), (32, None), (32, -5.0))
    ]
    norm = random(9, 4, 32), random(9, 4, 32, seed=1), random(32, seed=2), 1e-6
    return [
        OpCase("causal_conv", conv, {"taps": 4}, tolerance=ROUNDED, writes=True),
        *(OpCase("delta_gates", args, sizes, tolerance=1e-5) for args in gates),
        *(OpCase("delta_rule", args, sizes, tolerance=ROUNDED, writes=True) for args in rules),
        OpCase("gated_rms_norm", (*norm, "silu"), {"size": 32}, tolerance=ROUNDED),
        OpCase("gated_rms_norm", (*norm, "sigmoid"), {"size": 32}, tolerance=ROUNDED),
    ]


_SIZES_OF_HEADS = (2, 32), (2, 32), (4, 16)

_MAKERS: tuple[Callable[[], list[OpCase]], ...] = (
    _elementwise, _products, _routings, _sampling, _steps, _recurrent,
)  # fmt: skip


def cases() -> list[OpCase]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [case for make in _MAKERS for case in make()]
