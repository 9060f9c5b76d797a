"""Layers whose experts lie whole on different ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import Ranks, run_ranks, run_threads

from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.model_ops.expert_parallel import HeldExperts, share_of_rows
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.moe import FusedMoE
from atom.platform import cpu_platform

EXPERTS, TOP_K, HIDDEN, INTER = 7, 3, 10, 6

Visits = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def create(group: ParallelGroup = SINGLE, experts: ParallelGroup = SINGLE) -> FusedMoE:
    context = LayerContext.create(torch.float32, 8, cpu_platform(), group)
    return FusedMoE(EXPERTS, TOP_K, HIDDEN, INTER, replace(context, experts=experts), "experts")


@torch.no_grad()
def filled(group: ParallelGroup = SINGLE, experts: ParallelGroup = SINGLE) -> FusedMoE:
    """With the same weights whatever the ranks."""
    moe, generator = create(group, experts), torch.Generator().manual_seed(0)
    for name, shape in {
        "w13_weight": (EXPERTS, 2 * INTER, HIDDEN),
        "w2_weight": (EXPERTS, HIDDEN, INTER),
    }.items():
        moe.load_weight(name, torch.randn(shape, generator=generator) * 0.4, None)
    return moe


def visits(num_tokens: int, seed: int) -> Visits:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    return x, torch.rand(num_tokens, TOP_K, generator=generator), ids


@pytest.mark.parametrize(("experts", "size"), [(7, 3), (8, 4), (4, 4), (5, 1)])
def test_each_expert_has_one_rank(experts: int, size: int) -> None:
    ids = torch.arange(experts, dtype=torch.int32)
    held = [HeldExperts(experts, ParallelGroup(rank, size)) for rank in range(size)]
    assert max(h.count for h in held) - min(h.count for h in held) <= 1
    for rank, h in enumerate(held):
        mine = [e for e in range(experts) if e in h]
        assert [i for i, r in enumerate(h.ranks(ids).tolist()) if r == rank] == mine
        places = h.places(ids).tolist()
        assert [places[e] for e in mine] == list(range(h.count))
        assert all(places[e] == h.count for e in range(experts) if e not in h)
        assert h.elsewhere == experts - h.count


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="7 experts do not spread over 8 ranks"):
        create(ParallelGroup(0, 8), ParallelGroup(0, 8))


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_ranks_with_all_tokens_add_what_their_experts_make(num_tokens: int) -> None:
    given = visits(num_tokens, 1)
    parts = [filled(*[ParallelGroup(rank, 3)] * 2)(*given) for rank in range(3)]
    torch.testing.assert_close(sum(parts), filled()(*given), atol=1e-5, rtol=1e-5)


def test_a_rank_without_a_chosen_expert_adds_nothing() -> None:
    x, weights, _ = visits(4, 1)
    ids = torch.tensor([[0, 1, 2]]).expand(4, 3)  # the first rank's
    last = filled(*[ParallelGroup(2, 3)] * 2)
    for rows in (1, 4):
        assert not last(x[:rows], weights[:rows], ids[:rows]).any()


@pytest.mark.parametrize(("tensor", "engines"), [(1, 2), (2, 2), (3, 2), (1, 4)])
def test_tokens_travel_to_their_experts(tensor: int, engines: int) -> None:
    """Engines of `tensor` ranks with different numbers of tokens, one with none."""
    ranks = Ranks()
    counts = [(5, 0, 1, 12), (0, 2, 3, 1), (1, 1, 1, 1)]

    def run(rank: int) -> list[torch.Tensor]:
        engine, place = divmod(rank, tensor)
        group = ranks.group(f"engine {engine}", place, tensor)
        experts = ranks.group("experts", rank, tensor * engines)
        moe = filled(group, experts)
        return [moe(*visits(round[engine], engine)) for round in counts]

    results, whole = run_threads(tensor * engines, run), filled()
    for i, round in enumerate(counts):
        for engine in range(engines):
            of_ranks = results[engine * tensor : (engine + 1) * tensor]
            expected = whole(*visits(round[engine], engine)) if round[engine] else 0.0
            total = torch.stack([parts[i] for parts in of_ranks]).sum(0)
            torch.testing.assert_close(
                total, torch.zeros_like(total) + expected, atol=1e-5, rtol=1e-5
            )


def test_a_row_does_not_depend_on_others() -> None:
    """One term to a sum, so that products have one value whatever their order."""
    x, weights, ids = visits(6, 3)

    def run(group: ParallelGroup) -> tuple[torch.Tensor, torch.Tensor]:
        moe = create(SINGLE, group)
        generator = torch.Generator().manual_seed(group.rank)
        for weight in (moe.w13_weight, moe.w2_weight):
            values = torch.randn(weight.shape, generator=generator)
            weight.data.copy_(torch.where(torch.arange(weight.shape[-1]) == 2, values, 0.0))
        mine = slice(0, 6) if group.rank == 0 else slice(4, 5)
        return moe(x[mine], weights[mine], ids[mine]), moe(x[4:5], weights[4:5], ids[4:5])

    (together, alone), _ = run_ranks(2, run)
    assert torch.equal(together[4:5], alone)


def test_rows_are_shared_out() -> None:
    shares = [share_of_rows(5, ParallelGroup(rank, 4)) for rank in range(4)]
    assert [list(range(5))[s] for s in shares] == [[0, 1], [2, 3], [4], []]
