"""Mixtures of experts: Kimi-K2.5 and K3 at TP8, and DeepSeek-V2-Lite, from one token to a long
prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from aot_case import Case

from atom.model_ops.gates import SILU, Gate, SituGate, gate_shape
from atom.model_ops.kernels.triton.products.moe_align import moe_align
from atom.model_ops.registry import Implementation, OpQuery
from atom.model_ops.routing import Routing

KIMI_ROUTING = Routing(384, 8, "sigmoid", 1, 1, "top2_sum", True, 2.827)
K3_ROUTING = Routing(896, 16, "sigmoid", 1, 1, "top2_sum", True, 2.827)
V3_ROUTING = Routing(256, 8, "sigmoid", 8, 4, "top2_sum", True, 2.5)
LITE_ROUTING = Routing(64, 6, "softmax")


@dataclass(frozen=True)
class Experts:
    """One rank's experts: how many, of how many a token visits, hidden and intermediate size, and
    how many experts other ranks hold.
    """

    experts: int
    top_k: int
    hidden: int
    inter: int
    elsewhere: int = 0

    @property
    def shape(self) -> dict[str, int]:
        """Of a query."""
        sizes = {"hidden_size": self.hidden, "intermediate_size": self.inter}
        return {"num_experts": self.experts, **sizes}

    def arguments(self, query: OpQuery, num_tokens: int) -> tuple[object, ...]:
        # Weights of a real size are never touched, hence cost no memory.
        return (
            torch.empty(num_tokens, self.hidden, dtype=query.dtype),
            torch.empty(self.experts, 2 * self.inter, self.hidden, dtype=query.dtype),
            torch.empty(self.experts, self.hidden, self.inter, dtype=query.dtype),
            torch.empty(num_tokens, self.top_k),
            torch.empty(num_tokens, self.top_k, dtype=torch.int64),
            self.elsewhere,
        )


KIMI_TP8 = Experts(384, 8, 7168, 256)
KIMI_EP8 = Experts(48, 8, 7168, 2048, elsewhere=336)
# Of its latent rows.
K3_TP8 = Experts(896, 16, 3584, 384)
# Kimi-K3's gate.
SITU = SituGate(4.0, 25.0)
LITE = Experts(64, 6, 2048, 1408)
LITE_TP8 = Experts(64, 6, 2048, 176)


def _route(name: str, routing: Routing, biased: bool) -> Case:
    def arguments(_: OpQuery) -> tuple[object, ...]:
        bias = torch.empty(routing.num_experts) if biased else None
        return torch.empty(64, routing.num_experts), bias, routing

    shape = {"num_experts": routing.num_experts, "top_k": routing.top_k}
    return Case(f"moe_route/{name}", "moe_route", arguments, shape, dtype=torch.float32)


def _experts(
    name: str,
    sizes: Experts,
    num_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    gate: Gate = SILU,
) -> Case:
    return Case(
        f"moe_experts/{name} of {num_tokens}",
        "moe_experts",
        lambda query: (*sizes.arguments(query, num_tokens), gate),
        {**sizes.shape, **gate_shape(gate)},
        dtype=dtype,
        matrix=("_grouped_product", "_grouped_product#2") if dtype != torch.float32 else (),
        hands_over=("_grouped_product",) if num_tokens == 1 else (),
    )


@dataclass(frozen=True)
class _Align(Case):
    """What products of experts launch first."""

    def entry(self) -> Implementation:
        return Implementation("triton", lambda _: None, lambda: moe_align)


def _align(block_m: int, *tokens: int) -> Case:
    """Numbers of tokens that are read in chunks of one size."""

    def of(count: int) -> Callable[[OpQuery], tuple[object, ...]]:
        return lambda _: (torch.empty(count, 8, dtype=torch.int64), 384, block_m)

    name, (first, *others) = f"moe_align/{block_m}", map(of, tokens)
    return _Align(name, "moe_align", first, {}, batches=tuple(others))


CASES: tuple[Case, ...] = (
    # Of 515 tokens the count of the blocks lies where no vector begins.
    _align(16, 513, 515, 1024),
    _route("kimi", KIMI_ROUTING, True),
    _route("kimi with its shared expert", replace(KIMI_ROUTING, has_shared=True), True),
    _route("kimi k3", K3_ROUTING, True),
    _route("deepseek v3", V3_ROUTING, True),
    _route("deepseek v2 lite", LITE_ROUTING, False),
    *(_experts("kimi tp8", KIMI_TP8, tokens) for tokens in (1, 64, 1024, 8192)),
    _experts("kimi ep8", KIMI_EP8, 64),
    *(_experts("kimi k3 tp8", K3_TP8, tokens, gate=SITU) for tokens in (64, 8192)),
    *(_experts("deepseek v2 lite", LITE, tokens) for tokens in (64, 2048)),
    _experts("deepseek v2 lite tp8", LITE_TP8, 64),
    _experts("deepseek v2 lite float16", LITE, 512, torch.float16),
    *(_experts("deepseek v2 lite float32", LITE, tokens, torch.float32) for tokens in (4, 512)),
)
