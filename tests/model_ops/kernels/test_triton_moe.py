"""Routing, alignment and experts against plain readings in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops.kernels.torch import moe as torch_moe
from atom.model_ops.kernels.triton.products import moe_align as align_module
from atom.model_ops.kernels.triton.products import moe_experts
from atom.model_ops.kernels.triton.products.moe_align import max_blocks, moe_align
from atom.model_ops.kernels.triton.products.moe_experts import (
    Tiles,
    choose_block_m,
    choose_tiles,
)
from atom.model_ops.kernels.triton.products.moe_route import moe_route, refuses
from atom.model_ops.kernels.triton.products.moe_splits import choose_splits
from atom.model_ops.registry import OpQuery
from atom.model_ops.routing import Routing
from atom.platform import cpu_platform, current_platform

# Of the largest output: three roundings to the type on the way.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
ROUTINGS = {
    "kimi": Routing(384, 8, "sigmoid", 1, 1, "top2_sum", True, 2.827),
    "v3": Routing(256, 8, "sigmoid", 8, 4, "top2_sum", True, 2.5),
    "v2": Routing(160, 6, "softmax", 8, 3, "max", False, 16.0),
    "widest": Routing(1024, 16, "softmax", renormalize=True),
    "odd groups": Routing(21, 5, "sigmoid", 7, 3, "top2_sum"),
    "every group": Routing(12, 3, "softmax", 3, 3, "max"),
    "smallest": Routing(2, 1, "softmax"),
}


def tiles_on(device: torch.device) -> list[str]:
    """Kinds of platform whose tiles can run here."""
    return ["rocm", "cuda"] if device.type == "cpu" else [current_platform().kind]


def route_by_definition(
    logits: torch.Tensor, bias: torch.Tensor | None, r: Routing
) -> list[dict[int, float]]:
    rows = []
    for row in logits.double():
        scores = row.softmax(0) if r.scoring == "softmax" else row.sigmoid()
        choice = scores if bias is None else scores + bias.double()
        grouped = choice.view(r.num_groups, r.group_size).sort(descending=True).values
        worth = grouped[:, : 1 if r.group_score == "max" else 2].sum(1)
        best = worth.topk(r.top_groups).indices.tolist()
        eligible = [e for e in range(r.num_experts) if e // r.group_size in best]
        chosen = sorted(eligible, key=lambda e: -choice[e].item())[: r.top_k]
        total = scores[chosen].sum() if r.renormalize else 1.0
        rows.append({e: (scores[e] / total * r.scaling).item() for e in chosen})
    return rows


class TestRouting:
    @pytest.mark.parametrize("biased", [True, False], ids=["biased", "unbiased"])
    @pytest.mark.parametrize("name", ROUTINGS)
    def test_equals_the_definition(self, name: str, biased: bool, device: torch.device) -> None:
        routing = ROUTINGS[name]
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(2, routing.num_experts, generator=generator)
        bias = torch.randn(routing.num_experts, generator=generator) * 0.3 if biased else None
        on_device = None if bias is None else bias.to(device)
        weights, ids = moe_route(logits.to(device), on_device, routing)
        assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
        expected = route_by_definition(logits, bias, routing)
        for row, wanted in enumerate(expected):
            # In the order of preference, which is the definition's.
            assert ids[row].tolist() == list(wanted)
            assert weights[row].tolist() == pytest.approx(list(wanted.values()), rel=1e-5)
        _, by_torch = torch_moe.moe_route(logits, bias, routing)
        assert torch.equal(by_torch.sort().values, ids.cpu().sort().values)

    @pytest.mark.parametrize("name", ["kimi", "smallest"])
    def test_a_shared_expert_follows(self, name: str, device: torch.device) -> None:
        routing = ROUTINGS[name]
        logits = torch.randn(3, routing.num_experts, generator=torch.Generator().manual_seed(4))
        alone = moe_route(logits.to(device), None, routing)
        shared = replace(routing, has_shared=True)
        for route in (moe_route, torch_moe.moe_route):
            weights, ids = (x.cpu() for x in route(logits.to(device), None, shared))
            assert weights[:, -1].tolist() == [1.0] * 3
            assert ids[:, -1].tolist() == [routing.num_experts] * 3
            torch.testing.assert_close(weights[:, :-1].sort().values, alone[0].cpu().sort().values)
            assert ids[:, :-1].sort().values.tolist() == alone[1].cpu().sort().values.tolist()

    def test_of_equals_the_lowest_id_wins(self, device: torch.device) -> None:
        logits = torch.zeros(1, 12, device=device)
        logits[0, 7] = 1.0
        _, ids = moe_route(logits, None, Routing(12, 4, "sigmoid"))
        assert ids.tolist() == [[7, 0, 1, 2]]
        # The group of 7, and of the other two the first.
        _, ids = moe_route(logits, None, Routing(12, 6, "softmax", 3, 2, "top2_sum"))
        assert ids.tolist() == [[7, 0, 1, 2, 3, 4]]

    def test_signs_and_infinities_are_ordered(self, device: torch.device) -> None:
        bias = torch.tensor([-3.0, float("-inf"), -1.0, 0.0, -2.0, 5.0], device=device)
        _, ids = moe_route(torch.zeros(1, 6, device=device), bias, Routing(6, 6, "sigmoid"))
        assert ids.tolist() == [[5, 3, 2, 4, 0, 1]]

    def test_ids_are_valid_whatever_the_logits(self, device: torch.device) -> None:
        logits = torch.full((2, 12), float("nan"), device=device)
        logits[1] = float("-inf")
        for routing in (Routing(12, 4, "softmax"), Routing(12, 4, "softmax", 3, 1, "top2_sum")):
            _, ids = moe_route(logits, None, routing)
            assert all(len(set(row)) == 4 and max(row) < 12 for row in ids.tolist())

    def test_rows_may_lie_apart(self, device: torch.device) -> None:
        routing = Routing(6, 2, "sigmoid")
        logits = torch.randn(3, 20, device=device)[:, 5:17:2]
        for ours, theirs in zip(
            moe_route(logits, None, routing),
            moe_route(logits.contiguous(), None, routing),
            strict=True,
        ):
            assert torch.equal(ours, theirs)
        assert moe_route(logits[:0], None, routing)[1].shape == (0, 2)

    def test_what_is_refused(self) -> None:
        def query(dtype: torch.dtype, experts: int, top_k: int) -> OpQuery:
            return OpQuery(cpu_platform(), dtype, {"num_experts": experts, "top_k": top_k})

        assert refuses(query(torch.float32, 1024, 16)) is None
        assert align_module.refuses(query(torch.bfloat16, 1024, 16)) is None
        assert "float16" in str(refuses(query(torch.float16, 8, 2)))
        assert "1025" in str(refuses(query(torch.float32, 1025, 2)))
        assert "1025" in str(align_module.refuses(query(torch.bfloat16, 1025, 2)))
        assert "17" in str(refuses(query(torch.float32, 64, 17)))


class TestAlignment:
    def check(self, ids: torch.Tensor, num_experts: int, block_m: int) -> None:
        found = moe_align(ids, num_experts, block_m)
        assert found.limit == max_blocks(ids.numel(), num_experts, block_m)
        flat = ids.flatten().tolist()
        experts: list[int] = []
        rows: list[list[int]] = []
        for expert in range(num_experts):
            pairs = [p for p, visited in enumerate(flat) if visited == expert]
            for start in range(0, len(pairs), block_m):
                block = pairs[start : start + block_m]
                experts.append(expert)
                rows.append(block + [len(flat)] * (block_m - len(block)))
        count = int(found.count)
        assert count == len(experts) <= found.limit
        assert found.experts[:count].tolist() == experts
        assert found.pairs.view(-1, block_m)[:count].tolist() == rows

    @pytest.mark.parametrize(
        ("num_experts", "num_tokens", "top_k", "block_m"),
        [(8, 1, 2, 16), (5, 40, 2, 16), (3, 100, 3, 64), (2, 2100, 2, 128)],
        ids=["one token", "several blocks", "large blocks", "more than a chunk"],
    )
    def test_equals_sorting(
        self, num_experts: int, num_tokens: int, top_k: int, block_m: int, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(num_tokens)
        order = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)
        self.check(order[:, :top_k].contiguous().to(device), num_experts, block_m)

    def test_one_expert_visited_by_all(self, device: torch.device) -> None:
        self.check(torch.full((35, 1), 3, device=device), 6, 16)

    def test_the_last_expert_of_many(self, device: torch.device) -> None:
        self.check(torch.tensor([[512, 7, 300]], device=device), 513, 16)

    @settings(max_examples=50)
    @given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.sampled_from([4, 16, 64]))
    def test_no_visits_make_more_blocks_than_the_limit(
        self, visits: list[int], block_m: int
    ) -> None:
        blocks = sum(-(-count // block_m) for count in visits)
        if sum(visits):
            assert blocks <= max_blocks(sum(visits), len(visits), block_m)


def experts_by_definition(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    x, w13, w2, weights = (t.double().cpu() for t in (x, w13, w2, weights))
    out = torch.zeros_like(x)
    for t, visited in enumerate(ids.tolist()):
        for weight, e in zip(weights[t], visited, strict=True):
            gate, up = (w13[e] @ x[t]).chunk(2)
            out[t] += weight * (w2[e] @ (F.silu(gate) * up))
    return out


Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def problem(
    num_tokens: int,
    experts: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    hidden: int = 96,
    inter: int = 40,
    top_k: int = 2,
) -> Problem:
    """x, w13, w2, weights and ids, random."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, generator=generator)
    w13 = torch.randn(experts, 2 * inter, hidden, generator=generator) * hidden**-0.5
    w2 = torch.randn(experts, hidden, inter, generator=generator) * inter**-0.5
    weights = torch.rand(num_tokens, top_k, generator=generator)
    ids = torch.rand(num_tokens, experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    x, w13, w2 = (tensor.to(device, dtype) for tensor in (x, w13, w2))
    return x, w13, w2, weights.to(device), ids.to(device)


def assert_equals_the_definition(kind: str, arguments: Problem) -> None:
    out = moe_experts.mixture(kind, *arguments)
    assert out.dtype == arguments[0].dtype
    expected = experts_by_definition(*arguments)
    error = (out.double().cpu() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[out.dtype]


class TestExperts:
    @pytest.mark.parametrize(
        ("num_tokens", "dtype"), [(6, torch.float32), (1, torch.bfloat16), (1, torch.float16)]
    )
    def test_few_tokens(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        for kind in tiles_on(device):
            assert_equals_the_definition(kind, problem(num_tokens, 5, device, dtype))

    @pytest.mark.parametrize(("num_tokens", "block_m"), [(20, 64), (66, 128)])
    def test_many_tokens(self, num_tokens: int, block_m: int, device: torch.device) -> None:
        experts = 3 if block_m == 64 else 2
        assert choose_block_m(2 * num_tokens, experts) == block_m
        for kind in tiles_on(device):
            assert_equals_the_definition(
                kind, problem(num_tokens, experts, device, torch.bfloat16, hidden=128, inter=64)
            )

    @pytest.mark.parametrize(("kind", "dtype"), [("rocm", torch.bfloat16), ("cuda", torch.float32)])
    def test_inputs_in_splits(
        self,
        kind: str,
        dtype: torch.dtype,
        device: torch.device,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Of two blocks, and of one and a half."""
        if kind not in tiles_on(device):
            pytest.skip("the other vendor's tiles")
        monkeypatch.setattr(moe_experts, "choose_splits", lambda *_: 2)
        hidden = 7 * moe_experts._BLOCK_K[dtype] // 2
        assert_equals_the_definition(kind, problem(1, 3, device, dtype, hidden, inter=16))

    def test_splits_fill_the_device_and_are_long(self) -> None:
        assert choose_splits("rocm", 128, 7168) == 4  # one token of Kimi-K2.5 at TP8
        assert choose_splits("cuda", 64, 7168) == 7
        assert choose_splits("rocm", 128, 2048) == 2
        assert choose_splits("rocm", 700, 7168) == 1
        assert choose_splits("rocm", 8, 1000) == 1
        assert choose_splits("cpu", 1, 7168) == 1

    def test_experts_nobody_visits_and_one_that_all_do(self, device: torch.device) -> None:
        x, w13, w2, weights, _ = problem(19, 6, device, top_k=1)
        w13[:4], w13[5], w2[:4], w2[5] = (float("nan"),) * 4
        ids = torch.full((19, 1), 4, device=device)
        assert_equals_the_definition(tiles_on(device)[0], (x, w13, w2, weights, ids))

    @pytest.mark.parametrize("num_tokens", [3, 40])
    def test_experts_elsewhere_add_nothing(self, num_tokens: int, device: torch.device) -> None:
        x, w13, w2, weights, ids = problem(num_tokens, 5, device)
        ids[1], ids[0, 1], ids[2, 0] = 5, 5, 5
        expected = experts_by_definition(
            x,
            torch.cat((w13, torch.zeros_like(w13[:1]))),
            torch.cat((w2, torch.zeros_like(w2[:1]))),
            weights,
            ids,
        )
        out = moe_experts.mixture(tiles_on(device)[0], x, w13, w2, weights, ids, 15)
        assert not out[1].any()
        error = (out.double().cpu() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[out.dtype]

    def test_no_tokens(self, device: torch.device) -> None:
        x, w13, w2, weights, ids = problem(2, 3, device)
        out = moe_experts.mixture("cuda", x[:0], w13, w2, weights[:0], ids[:0])
        assert out.shape == (0, 96)

    def test_activations_may_lie_apart(self, device: torch.device) -> None:
        x, *rest = problem(3, 4, device)
        apart = torch.zeros(3, 200, device=device)[:, 3:195:2]
        apart.copy_(x)
        kind = tiles_on(device)[0]
        expected = moe_experts.mixture(kind, x, *rest)
        assert torch.equal(moe_experts.mixture(kind, apart, *rest), expected)
        given = torch.empty_like(expected)
        assert moe_experts.mixture(kind, x, *rest, out=given) is given
        assert torch.equal(given, expected)

    def test_weights_with_rows_apart_are_refused(self, device: torch.device) -> None:
        x, w13, w2, weights, ids = problem(2, 3, device)
        w13 = w13.transpose(1, 2).contiguous().transpose(1, 2)
        with pytest.raises(ValueError, match="contiguous rows"):
            moe_experts.mixture("cuda", x, w13, w2, weights, ids)

    def test_slices_of_the_hidden_dimension_change_nothing(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arguments = problem(1, 2, device, hidden=600, inter=32)
        kind = tiles_on(device)[0]
        whole = moe_experts.mixture(kind, *arguments)
        monkeypatch.setattr(moe_experts, "_VISITS_BYTES", 1)
        assert moe_experts._slice_width(2, 600, 4) == 256
        assert torch.equal(moe_experts.mixture(kind, *arguments), whole)

    def test_experts_beyond_two_to_the_31(self, device: torch.device) -> None:
        """The third expert's weights lie 2^31 elements behind the first's."""
        x, w13, w2, weights, _ = problem(1, 1, device, torch.float16, inter=16)
        stride, rows, hidden = 2**30, w13.shape[1], w13.shape[2]
        pool = torch.empty(2 * stride + w13.numel() + w2.numel(), dtype=x.dtype, device=device)
        far13 = pool.as_strided((3, rows, hidden), (stride, hidden, 1))
        far2 = pool.as_strided((3, hidden, 16), (stride, 16, 1), w13.numel())
        far13[2], far2[2] = w13[0], w2[0]
        far13[0], far2[0] = 0.0, 0.0
        kind = tiles_on(device)[0]
        ids, weights = torch.tensor([[2]], device=device), weights[:, :1]
        near = moe_experts.mixture(kind, x, w13, w2, weights, torch.zeros_like(ids))
        assert torch.equal(moe_experts.mixture(kind, x, far13, far2, weights, ids), near)


def one_term_a_block(w: torch.Tensor, block_k: int) -> torch.Tensor:
    """Leaves one input in each block of K, so that a block's sum has one value in any order."""
    kept = torch.arange(w.shape[-1], device=w.device) % block_k == 5
    return torch.where(kept, w, 0.0)


@pytest.mark.parametrize("kind", ["rocm", "cuda"])
def test_a_token_does_not_depend_on_its_batch(kind: str, device: torch.device) -> None:
    """Bit for bit, through three sizes of tiles: the blocks of K are added in the same order."""
    if kind not in tiles_on(device):
        pytest.skip("the other vendor's tiles")
    # 2 experts of which each token visits both, so that few tokens make large blocks.
    x, w13, w2, weights, ids = problem(70, 2, device, hidden=160, inter=96)
    if device.type == "cpu":
        # The interpreter's products inside a block are numpy's, in an order of its own.
        w13, w2 = one_term_a_block(w13, 32), one_term_a_block(w2, 32)
    assert [choose_block_m(2 * tokens, 2) for tokens in (1, 8, 9, 64, 65)] == [16, 16, 64, 64, 128]
    whole = moe_experts.mixture(kind, x, w13, w2, weights, ids)
    for part in (slice(69, 70), slice(3, 8), slice(40, 70)):
        alone = moe_experts.mixture(kind, x[part], w13, w2, weights[part], ids[part])
        assert torch.equal(alone, whole[part])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_token_does_not_depend_on_its_batch_on_a_gpu(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    x, w13, w2, weights, ids = problem(3000, 16, device, dtype, 1024, 256, 4)
    run = moe_experts.moe_experts
    whole = run(x, w13, w2, weights, ids)
    for part in (slice(7, 8), slice(50, 60), slice(1000, 1200)):
        assert torch.equal(run(x[part], w13, w2, weights[part], ids[part]), whole[part])


@pytest.mark.gpu
def test_a_graph_captures_the_whole_mixture() -> None:
    device = torch.device("cuda")
    x, w13, w2, *_ = problem(8, 16, device, torch.bfloat16, 256, 128, 4)
    logits, routing = torch.randn(8, 16, device=device), Routing(16, 4, "sigmoid")
    run = moe_experts.moe_experts
    run(x, w13, w2, *moe_route(logits, None, routing))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, w13, w2, *moe_route(logits, None, routing))
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    assert torch.equal(out, run(x, w13, w2, *moe_route(logits, None, routing)))


def test_tiles_share_what_decides_the_order_of_sums() -> None:
    for wide in (False, True):
        for kind, same in (("rocm", {"matrix_instr_nonkdim": 16}), ("cuda", {})):
            tiles = [
                choose_tiles(kind, block_m, pairs, 512, wide)
                for block_m, pairs in ((16, 8), (16, 512), (64, 8192), (128, 65536))
            ]
            assert all(isinstance(tile, Tiles) and tile.options == same for tile in tiles)
            assert {tile.weights_first for tile in tiles} == {kind == "cuda"}
            # Four warps of NVIDIA's wide instruction take 64 rows at least.
            assert kind != "cuda" or all(tile.block_n >= 64 for tile in tiles)


@pytest.mark.parametrize("num_experts", [1, 8, 17, 32, 34, 64, 160, 385, 512, 896])
def test_no_kernel_is_for_a_few_numbers_of_tokens_alone(num_experts: int) -> None:
    """The engine's warm-up tries some, each at most twice the one before."""
    served: dict[tuple[int, int], list[int]] = {}
    for num_pairs in range(1, 70 * num_experts):
        block_m = choose_block_m(num_pairs, num_experts)
        chunk = align_module.choose_chunk(num_pairs, num_experts, block_m)
        served.setdefault((block_m, chunk), []).append(num_pairs)
    *ended, _ = served.values()
    for numbers in ended:
        assert numbers == [*range(numbers[0], numbers[-1] + 1)]
        assert numbers[-1] > 3.9 * numbers[0]
