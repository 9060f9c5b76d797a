"""aiter's sums over ranks: buffers are exchanged once, and all ranks read them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fake_aiter import ENTRY_POINTS, DeviationError, FakeAiter
from ranks import run_ranks
from transformers import DeepseekV3Config

from atom.distributed.ordered import in_order
from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.embedding import VocabParallelEmbedding
from atom.model_ops.kernels import probe
from atom.model_ops.kernels.aiter import collectives
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import ResidualRMSNorm
from atom.model_ops.linear import LinearBase, RowParallelLinear
from atom.model_ops.moe import FusedMoE
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpTable
from atom.models.moe.deepseek_v2 import DeepseekV3MoE
from atom.platform import Platform

MI300X = Platform("rocm", "gfx942", True)
BF16 = torch.bfloat16
SIZE, EPS, ROOM = 512, 1e-5, 2**16
WITHOUT_TRITON = {op: tuple(e for e in OPS[op] if e.name != "triton") for op in OPS}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeAiter:
    monkeypatch.setattr(collectives, "_STAGED_BYTES", ROOM)
    return FakeAiter()


def context(group: ParallelGroup) -> LayerContext:
    return LayerContext(BF16, torch.device("cpu"), OpTable(MI300X, WITHOUT_TRITON), 8, group)


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
    assert fake.copies == 3 * size


def split_product(group: ParallelGroup, weight: torch.Tensor) -> RowParallelLinear:
    layer = RowParallelLinear(weight.shape[1], SIZE, False, context(group), "o_proj")
    layer.load_weight("weight", weight, None)
    layer.process_after_loading()
    return layer


@pytest.mark.parametrize("size", [2, 4])
def test_products_are_written_where_the_sum_reads_them(size: int, fake: FakeAiter) -> None:
    """One after another, for few rows and many: none is overwritten before all have read it."""
    weights = [random(SIZE, 64 * size, seed=seed) for seed in (1, 2, 3)]
    inputs = [[random(t, 64 * size, seed=10 * t + i) for i in range(3)] for t in (2, 4, 7)]

    def run(group: ParallelGroup) -> list[torch.Tensor]:
        group = replace(group, peer_access=True)
        layers = [split_product(group, weight) for weight in weights]
        norm = ResidualRMSNorm(SIZE, EPS, context(group))
        norm.weight.data.fill_(1)
        own, out = slice(64 * group.rank, 64 * group.rank + 64), []
        with torch.inference_mode():
            for of_layers in inputs:
                for layer, x in zip(layers, of_layers, strict=True):
                    part = layer(x[:, own].contiguous())
                    out.append(norm.add(part, torch.zeros_like(part))[1])
        return out

    with probe.replaced(fake.library):
        ranks = run_ranks(size, run)
    wanted = [
        x.double() @ w.double().T for row in inputs for x, w in zip(row, weights, strict=True)
    ]
    for outputs in ranks:
        for out, reference in zip(outputs, wanted, strict=True):
            check(out, reference)
    made = [call.name for call in fake.calls]
    assert made.count("fused_allreduce_rmsnorm") == len(wanted) * size
    assert made.count("wvSpltK") == 6 * size
    assert fake.copies == 0


def test_products_that_aiter_has_tuned_are_copied(fake: FakeAiter) -> None:
    """Its kernel allocates its result."""
    weight, x = random(SIZE, 128, seed=1), random(3, 128, seed=2)
    fake.tuned.add((3, SIZE, 64))

    def run(group: ParallelGroup) -> torch.Tensor:
        group = replace(group, peer_access=True)
        layer, norm = split_product(group, weight), ResidualRMSNorm(SIZE, EPS, context(group))
        norm.weight.data.fill_(1)
        with torch.inference_mode():
            part = layer(x[:, 64 * group.rank :][:, :64].contiguous())
            return norm.add(part, torch.zeros_like(part))[1]

    with probe.replaced(fake.library):
        for out in run_ranks(2, run):
            check(out, x.double() @ weight.double().T)
    assert "gemm_a16w16" in fake.names


@pytest.mark.parametrize(("shared", "copies"), [(2, 0), (1, 1)])
def test_experts_are_written_where_the_sum_reads_them(
    shared: int, copies: int, fake: FakeAiter
) -> None:
    """With the shared ones apart the sum of both is; aiter's own experts allocate their result."""
    config = DeepseekV3Config(
        hidden_size=SIZE,
        moe_intermediate_size=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=shared,
        n_group=1,
        topk_group=1,
    )
    x = random(5, SIZE, seed=4)

    def run(group: ParallelGroup, peer_access: bool) -> torch.Tensor:
        group = replace(group, peer_access=peer_access)
        layer = DeepseekV3MoE(config, context(group), "mlp")
        generator = torch.Generator().manual_seed(group.rank)
        for name, parameter in layer.named_parameters():
            if "gate." in name:  # the same on all ranks
                generator.manual_seed(9)
            values = torch.randn(parameter.shape, generator=generator) / 16
            parameter.data.copy_(values)
        for module in layer.modules():
            if isinstance(module, (FusedMoE, LinearBase)):
                module.process_after_loading()
        norm = ResidualRMSNorm(SIZE, EPS, context(group))
        norm.weight.data.fill_(1)
        with torch.inference_mode():
            part = layer(x)
            return norm.add(part, torch.zeros_like(part))[1]

    with probe.replaced(fake.library):
        wanted = run_ranks(2, lambda group: run(group, False))
        assert fake.copies == 0
        for out, reference in zip(
            run_ranks(2, lambda group: run(group, True)), wanted, strict=True
        ):
            check(out, reference.double())
    assert fake.copies == 2 * copies


def test_memory_that_the_sum_reads(fake: FakeAiter) -> None:
    """The fake takes nothing else without a copy."""
    cpu, most = torch.device("cpu"), ROOM // SIZE // 2

    def run(group: ParallelGroup) -> None:
        assert collectives.staging((0, SIZE), BF16, cpu, group) is None
        assert collectives.staging((most + 1, SIZE), BF16, cpu, group) is None
        staged = collectives.staging((most, SIZE), BF16, cpu, group)
        assert staged is not None
        assert (staged.shape, staged.dtype) == ((most, SIZE), BF16)
        again = collectives.staging((1, SIZE), BF16, cpu, group)
        assert again is not None
        assert again.data_ptr() == staged.data_ptr()  # as a captured graph remembers it
        other, channel = torch.zeros_like(staged), collectives._channel(group, cpu)
        args = other, other, other.clone(), other.clone(), other[0], EPS, 0, 0, False
        with pytest.raises(DeviationError, match="an input in one"):
            probe.function(ENTRY_POINTS["fused_allreduce_rmsnorm"])(channel.handle, *args)

    with probe.replaced(fake.library):
        run_ranks(2, run)


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
