"""aiter's sums over ranks: buffers are exchanged once, and all ranks read them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fake_aiter import FakeAiter
from ranks import run_ranks

from atom.distributed.ordered import in_order
from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.embedding import VocabParallelEmbedding
from atom.model_ops.kernels import probe
from atom.model_ops.kernels.aiter import collectives
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import ResidualRMSNorm
from atom.model_ops.ops import OPS
from atom.model_ops.registry import OpTable
from atom.platform import Platform

MI300X = Platform("rocm", "gfx942", True)
BF16 = torch.bfloat16
SIZE, EPS, ROOM = 512, 1e-5, 2**16


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeAiter:
    monkeypatch.setattr(collectives, "_STAGED_BYTES", ROOM)
    return FakeAiter()


def context(group: ParallelGroup) -> LayerContext:
    return LayerContext(BF16, torch.device("cpu"), OpTable(MI300X, OPS), 8, group)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def check(out: torch.Tensor, reference: torch.Tensor) -> None:
    error = (out.double() - reference).abs().max() / reference.abs().max()
    assert error < 2**-7, float(error)


@pytest.mark.parametrize("size", [2, 4])
def test_sums_and_norms(size: int, fake: FakeAiter) -> None:
    """Rows that fit the buffers, more than fit, and none."""
    weight, counts = random(SIZE, seed=1), (3, 1, 5, ROOM // SIZE // 2 + 1, 0)
    partials = [[random(t, SIZE, seed=10 * r + t) for t in counts] for r in range(size)]

    def sums(group: ParallelGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
        norm = ResidualRMSNorm(SIZE, EPS, context(replace(group, peer_access=True)))
        norm.weight.data.copy_(weight)
        own = partials[group.rank]
        with torch.inference_mode():
            return [norm.add(p.clone(), random(len(p), SIZE, seed=2)) for p in own]

    with probe.replaced(fake.library):
        ranks = run_ranks(size, sums)
    for outputs in ranks:
        for i, (normed, total) in enumerate(outputs):
            parts = torch.stack([of[i].double() for of in partials])
            expected = parts.sum(0) + random(counts[i], SIZE, seed=2).double()
            assert total.shape == (counts[i], SIZE)
            if counts[i]:
                check(total, expected)
                check(normed, F.rms_norm(expected, (SIZE,), weight.double(), EPS))
    made = [call.name for call in fake.calls]
    assert made.count("init_custom_ar") == size
    assert made.count("fused_allreduce_rmsnorm") == 3 * size


def test_an_embedding_is_summed(fake: FakeAiter) -> None:
    weight = random(10, SIZE, seed=3)

    def embed(group: ParallelGroup) -> torch.Tensor:
        embedding = VocabParallelEmbedding(
            10, SIZE, context(replace(group, peer_access=True)), "embed_tokens"
        )
        embedding.load_weight("weight", weight, None)
        with torch.inference_mode():
            return embedding(torch.arange(10))

    with probe.replaced(fake.library):
        for out in run_ranks(2, embed):
            assert torch.equal(out, weight)
    assert "all_reduce" in fake.names


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peer_access": False}, "all must be on one machine"),
        ({"num_ranks": 3}, "sums over 2, 4, 8 ranks, not 3"),
        ({"num_ranks": 6}, "sums over 2, 4, 8 ranks, not 6"),
        ({"size": 504}, "takes rows of 512 to 16384 numbers, a multiple of 8, not 504"),
        ({"size": 513}, "takes rows of 512 to 16384 numbers, a multiple of 8, not 513"),
        ({"size": 16392}, "takes rows of 512 to 16384 numbers, a multiple of 8, not 16392"),
    ],
)
def test_what_it_refuses(changes: dict[str, int], reason: str, fake: FakeAiter) -> None:
    table = OpTable(MI300X, OPS)
    shape = {"size": SIZE, "num_ranks": 2, "peer_access": True, **changes}
    with probe.replaced(fake.library):
        table.resolve("all_reduce_add_rms_norm", BF16, **shape)
    assert reason in table.describe()


@pytest.mark.parametrize(
    ("version", "sums", "norms"),
    [
        ("0.1.20.post1", True, True),
        ("0.1.21.dev46+ge4048607a5", True, True),  # built from what follows 0.1.20
        ("0.1.19.post1", True, True),
        ("0.1.20.dev1+g9312ef7c01", True, False),  # built from what follows 0.1.19
        ("0.1.19.post1.dev1", True, False),
        ("0.1.19", True, False),
        ("0.1.17rc0", True, False),
        ("0.1.16", True, False),
        ("0.1.16.dev3", False, False),
        ("0.1.15.post3", False, False),
        ("main", False, False),
        (None, False, False),
    ],
)
def test_releases_without_the_last_barrier_are_refused(
    version: str | None, sums: bool, norms: bool
) -> None:
    shape = {"size": SIZE, "num_ranks": 2, "peer_access": True}
    for op, runs, since in (
        ("all_reduce", sums, "0.1.16"),
        ("all_reduce_add_rms_norm", norms, "0.1.19.post1"),
    ):
        table = OpTable(MI300X, OPS)
        with probe.replaced(FakeAiter(version=version).library):
            table.resolve(op, BF16, **shape)
        report = table.describe()
        told = f"not aiter: before {since} its kernels end while other ranks still read"
        assert (told in report) is not runs
        assert runs or f"this aiter is {version or 'of an unknown version'}" in report


def test_sums_in_a_fixed_order_are_not_left_to_it(fake: FakeAiter) -> None:
    def choose(group: ParallelGroup) -> str:
        created = context(in_order(replace(group, peer_access=True)))
        ResidualRMSNorm(SIZE, EPS, created)
        return created.ops.describe()

    with probe.replaced(fake.library):
        for table in run_ranks(2, choose):
            assert "any order of sums" in table
