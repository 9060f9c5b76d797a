"""The ways to lay a model over GPUs, and what a decode step costs in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from atom.config import ConfigError
from atom.plan.gpus import Gpu
from atom.plan.sizes import RankSizes

# Memory that is neither weights nor KV cache nor counted: driver, code, graphs, collectives.
RUNTIME_BYTES = 4 * 10**9
_FLOAT32 = 4


@dataclass(frozen=True)
class Load:
    """What is asked of a deployment.

    Attributes:
        context: tokens of each sequence.
        concurrency: sequences at once, over all GPUs.
        batched_tokens: most tokens of a step.
        tokens_per_forward: of each sequence; more than 1 with speculation.
        queries: rows that a decode step computes for each sequence: drafts and one more.
    """

    context: int
    concurrency: int
    batched_tokens: int = 8192
    tokens_per_forward: float = 1.0
    queries: int = 1


@dataclass(frozen=True)
class Costs:
    """What a step costs beside reading memory.

    Attributes:
        efficiency: share of the stated bandwidth that kernels reach.
        collective: seconds of one all-reduce or all-to-all of a decode step.
    """

    efficiency: float
    collective: float


@dataclass(frozen=True)
class Plan:
    """One layout: bytes on each rank, and the time of a decode step.

    Attributes:
        name: such as `TP8`.
        sequences: that decode on one rank.
        weights, kv_cache, activations: bytes on one rank.
        read: bytes that a step reads on one rank.
        step: seconds.
    """

    name: str
    num_gpus: int
    sequences: int
    weights: int
    kv_cache: int
    activations: int
    read: int
    step: float
    room: int
    load: Load

    @property
    def needed(self) -> int:
        return self.weights + self.kv_cache + self.activations + RUNTIME_BYTES

    @property
    def fits(self) -> bool:
        return self.needed <= self.room

    @property
    def tokens_per_user(self) -> float:
        return self.load.tokens_per_forward / self.step

    @property
    def tokens(self) -> float:
        return self.tokens_per_user * self.load.concurrency


def plan_layouts(
    sizes_on: Callable[[int], RankSizes], num_gpus: int, gpu: Gpu, load: Load, costs: Costs
) -> list[Plan]:
    """All layouts over `num_gpus`; empty if the model does not split over them at all.

    Args:
        sizes_on: sizes on one of so many ranks that split every layer; ConfigError if they cannot.
    """
    plans = []
    whole = sizes_on(1)
    try:
        split = sizes_on(num_gpus)
        plans.append(_plan(f"TP{num_gpus}", num_gpus, split, gpu, load, costs, whole_experts=False))
    except ConfigError:
        split = None
    if whole.num_experts % num_gpus or num_gpus == 1 or not whole.num_experts:
        return plans
    share = whole.num_experts // num_gpus
    if split is not None:
        mixed = replace(split, expert=whole.expert, num_experts=share)
        plans.append(_plan(f"TP{num_gpus} EP{num_gpus}", num_gpus, mixed, gpu, load, costs, True))
    mine = replace(whole, num_experts=share)
    shared = replace(load, concurrency=-(-load.concurrency // num_gpus))
    name = f"DP{num_gpus} EP{num_gpus}"
    plans.append(
        replace(_plan(name, num_gpus, mine, gpu, shared, costs, True, num_gpus), load=load)
    )
    return plans


def _plan(
    name: str,
    num_gpus: int,
    sizes: RankSizes,
    gpu: Gpu,
    load: Load,
    costs: Costs,
    whole_experts: bool,
    num_groups: int = 1,
) -> Plan:
    """`load` is that of one group of ranks that attend together; `num_groups` share the experts."""
    rows = load.concurrency * load.queries
    total_experts = sizes.num_experts * (num_gpus if whole_experts else 1)
    visited = expected_visited(total_experts, sizes.top_k, rows * num_groups)
    if whole_experts:
        visited /= num_gpus
    states = sizes.state + (load.queries - 1) * sizes.state_of_draft
    kv_cache = load.concurrency * (load.context * sizes.cached_token + states)
    read = int(sizes.rest + visited * sizes.expert + kv_cache)
    collectives = 2 * sizes.num_layers if num_gpus > 1 else 0
    return Plan(
        name=name,
        num_gpus=num_gpus,
        sequences=load.concurrency,
        weights=sizes.weights,
        kv_cache=kv_cache,
        activations=activation_bytes(sizes, load),
        read=read,
        step=read / (gpu.bandwidth * costs.efficiency) + collectives * costs.collective,
        room=gpu.memory,
        load=load,
    )


def expected_visited(num_experts: int, top_k: int, rows: int) -> float:
    """Distinct experts of a layer that `rows` tokens visit, if every choice is as likely."""
    if not num_experts:
        return 0.0
    return num_experts * (1 - (1 - top_k / num_experts) ** rows)


def activation_bytes(sizes: RankSizes, load: Load) -> int:
    """An upper estimate: hidden states of the largest step, and float32 logits of a decode step.

    Eight tensors of a layer's width live at once in 16 bits, twice that between the products of an
    MLP or of experts; logits and one copy of them for sampling.
    """
    width = max(sizes.top_k, 1) * sizes.hidden_size
    hidden = load.batched_tokens * (8 * sizes.hidden_size + 2 * width) * 2
    logits = 2 * load.concurrency * load.queries * sizes.vocab_size * _FLOAT32
    return hidden + logits
