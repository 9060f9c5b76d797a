"""FlashMLA's latent decode against float64 references: over the fake, and over FlashMLA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aiter_cases import BF16, Aiter, all_slots, check, random, unknown_lengths
from fake_aiter import FakeAiter
from fake_flash_mla import DeviationError, FakeFlashMLA
from graphs.test_capture_without_host import nothing_from_the_host
from test_aiter_capture import empty, in_a_graph
from test_aiter_mla import Latents, latents

from atom.graphs.capture import CudaGraphBackend, ReexecuteBackend
from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels import probe
from atom.model_ops.kernels.flash_mla import decode as adapter
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpQuery, OpTable
from atom.platform import Platform, current_platform

H100 = Platform("cuda", "sm90", True)
SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_heads": 8}
SIZES |= {"block_size": 64, "num_blocks": 99}
CONTEXTS = [200, 64, 17]


@dataclass(frozen=True)
class Library:
    """Attributes:
    there: FlashMLA's decode, torch's ops beside it, and the device.
    fake: what stands behind it; None when it is FlashMLA itself.
    """

    there: Aiter
    fake: FakeFlashMLA | None

    def made(self, heads: int, query_lens: list[int], context_lens: list[int]) -> Latents:
        return latents(self.there, heads, query_lens, context_lens, block_size=64)


def tables(platform: Platform) -> OpTable:
    names = {"mla_decode": "flash_mla", "mla_cache_write": "torch", "mla_prefill": "torch"}
    return OpTable(
        platform, {op: tuple(e for e in OPS[op] if e.name == n) for op, n in names.items()}
    )


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    if request.param == "fake":
        fake = FakeFlashMLA()
        with probe.replaced(fake.library):
            yield Library(Aiter(tables(H100), torch.device("cpu"), None), fake)
        return
    platform = current_platform()
    if reason := adapter.refuses(OpQuery(platform, BF16, SIZES, BF16)):
        pytest.skip(reason)
    yield Library(Aiter(tables(platform), torch.device("cuda"), None), None)


def run(made: Latents, metadata: AttentionMetadata) -> torch.Tensor:
    out: torch.Tensor = made.decode(made.q, made.cache, made.up_proj, metadata, 0.1)
    return out


@pytest.mark.parametrize("heads", [8, 20, 64, 128])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [4, 4, 4], [16, 16, 16], [1, 5, 2]])
def test_decode(library: Library, heads: int, query_lens: list[int]) -> None:
    made = library.made(heads, query_lens, CONTEXTS)
    for metadata in (made.metadata, unknown_lengths(made.metadata)):
        check(run(made, metadata), made.wanted, 2**-5)
    if library.fake is not None:
        shapes = [call.q_shape for call in library.fake.calls]
        assert shapes == [(3, max(query_lens), heads, 576)] * 2


def test_queries_of_a_sequence_shorter_than_the_longest_are_its_last(library: Library) -> None:
    """Also where the context is shorter than the longest sequence's queries."""
    made = library.made(8, [3, 16, 1], [3, 80, 1])
    check(run(made, made.metadata), made.wanted, 2**-5)


def test_nothing_beyond_a_context_counts(library: Library) -> None:
    """Neither what lies in its last block nor the blocks that its table names after it."""
    made = library.made(8, [2, 2], [70, 5])
    pool, metadata = made.cache.latent, made.metadata
    beyond = torch.ones(pool.shape[0] * 64, dtype=torch.bool, device=pool.device)
    beyond[torch.cat(all_slots(metadata, 64))] = False
    pool.flatten(0, 1)[beyond] = torch.nan
    stale = F.pad(metadata.block_tables, (0, 3), value=1)
    check(run(made, replace(metadata, block_tables=stale)), made.wanted, 2**-5)


def test_layers_of_a_pass_share_a_plan() -> None:
    """The next pass, with other lengths, makes its own; so do layers with other heads."""
    fake = FakeFlashMLA()
    with probe.replaced(fake.library):
        library = Library(Aiter(tables(H100), torch.device("cpu"), None), fake)
        made, other = (library.made(heads, [2, 2], [70, 5]) for heads in (8, 4))
        metadata = made.metadata
        for each in (made, made, other, other):
            check(run(each, metadata), each.wanted, 2**-5)
        run(made, replace(metadata, context_lens=metadata.context_lens - 1))
        assert [call.planned for call in fake.calls] == [True, False, True, False, True]


def test_a_graph_plans_for_the_lengths_of_its_replay(library: Library) -> None:
    made = library.made(8, [2, 2, 2], [600, 33, 128])
    lens = made.metadata.context_lens
    there = torch.full_like(lens, 2)
    out = torch.zeros_like(made.wanted, dtype=BF16)
    backend = ReexecuteBackend() if library.fake is not None else CudaGraphBackend()

    def two_layers() -> None:
        """The second one reads the first one's plan."""
        metadata = replace(made.metadata, context_lens=there, context_lens_cpu=None)
        run(made, metadata)
        out.copy_(run(made, metadata))

    replay = backend.capture(two_layers)
    there.copy_(lens)
    replay()
    check(out, made.wanted, 2**-5)
    there.fill_(2)
    replay()
    there.copy_(lens)
    replay()
    check(out, made.wanted, 2**-5)


@pytest.mark.parametrize("queries", [1, 4])
def test_nothing_is_asked_of_the_host(queries: int) -> None:
    """On tensors that hold no data."""

    def decode(*args: Any, **_: Any) -> tuple[torch.Tensor, None]:
        return empty(*args[0].shape[:3], 512), None

    def plan(*_: Any) -> tuple[None, None]:
        return None, None

    functions = {"flash_mla_with_kvcache": decode, "get_mla_metadata": plan}
    with probe.replaced(probe.Library(lambda _: functions)):
        attend = tables(H100).resolve("mla_decode", BF16, BF16, **SIZES)
        metadata = in_a_graph(queries)
        q = empty(len(metadata.slot_mapping), 8, 80)
        with nothing_from_the_host():
            cache = LatentCacheTensor(empty(9, 64, 576))
            out = attend(q, cache, empty(8, 48, 512), metadata, 0.1)
    assert out.shape == (len(q), 8, 32)


def refusal(
    platform: Platform = H100,
    dtype: torch.dtype = BF16,
    storage: torch.dtype = BF16,
    **sizes: int,
) -> str | None:
    return adapter.refuses(OpQuery(platform, dtype, {**SIZES, **sizes}, storage))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"num_heads": 128, "v_head_dim": 256}, None),
        (
            {"platform": Platform("cuda", "sm100", True)},
            "dense decode is compiled for sm90, this is sm100",
        ),
        (
            {"platform": Platform("cuda", "sm89", True)},
            "dense decode is compiled for sm90, this is sm89",
        ),
        ({"dtype": torch.float16}, "computes in bfloat16, not float16"),
        ({"dtype": torch.float32}, "computes in bfloat16, not float32"),
        ({"storage": torch.float8_e4m3fn}, "reads a cache in bfloat16, not float8_e4m3fn"),
        ({"kv_lora_rank": 256}, "latents have 512 + 64 elements, not 256 + 64"),
        ({"qk_rope_head_dim": 32}, "latents have 512 + 64 elements, not 512 + 32"),
        ({"block_size": 16}, "reads blocks of 64, not block_size=16"),
        ({"block_size": 128}, "reads blocks of 64, not block_size=128"),
    ],
)
def test_what_it_does_not_take_is_refused(given: dict[str, Any], reason: str | None) -> None:
    with probe.replaced(FakeFlashMLA().library):
        assert refusal(**given) == reason


@pytest.mark.parametrize("missing", ["get_mla_metadata", "flash_mla_with_kvcache"])
def test_a_missing_function_is_a_reason(missing: str) -> None:
    with probe.replaced(FakeFlashMLA(missing=(missing,)).library):
        assert refusal() == f"this flash_mla has no flash_mla.{missing}"


def test_an_import_that_fails_is_a_reason() -> None:
    with probe.replaced(FakeAiter().library):
        reason = "import flash_mla: ModuleNotFoundError: No module named 'flash_mla'"
        assert refusal() == reason


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_without_cuda_nothing_is_imported() -> None:
    assert refusal() == "torch is not built for CUDA"


def test_releases_that_plan_from_lengths_are_refused() -> None:
    def get_mla_metadata(
        cache_seqlens: Any, num_heads_per_head_k: Any, num_heads_k: Any
    ) -> None: ...

    functions = {**FakeFlashMLA().library.load("flash_mla"), "get_mla_metadata": get_mla_metadata}
    with probe.replaced(probe.Library(lambda _: functions)):
        assert refusal() == (
            "this flash_mla's get_mla_metadata takes "
            "(cache_seqlens, num_heads_per_head_k, num_heads_k), not ()"
        )


def test_it_is_preferred_on_cuda_unless_rows_must_not_depend_on_their_batch() -> None:
    pytest.importorskip("triton")
    with probe.replaced(FakeFlashMLA().library):
        table = OpTable(H100, OPS)
        assert table.resolve("mla_decode", BF16, BF16, **SIZES) is adapter.mla_decode
        small = {**SIZES, "block_size": 16}
        assert table.resolve("mla_decode", BF16, BF16, **small) is not adapter.mla_decode
        assert "not flash_mla: reads blocks of 64, not block_size=16" in table.describe()
        invariant = OpTable(H100, OPS, batch_invariant=True)
        invariant.resolve("mla_decode", BF16, BF16, **SIZES)
        assert "not flash_mla: not batch-invariant" in invariant.describe()


def test_the_fake_notices_deviations() -> None:
    fake = FakeFlashMLA().library.load("flash_mla")
    decode = fake["flash_mla_with_kvcache"]
    cpu = Aiter(tables(H100), torch.device("cpu"), None)
    q, pool = random(cpu, 2, 1, 8, 576), random(cpu, 3, 64, 1, 576)
    blocks = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
    lens = torch.tensor([70, 5], dtype=torch.int32)
    good = (q, pool, blocks, lens, 512)

    def call(*args: Any, plan: Any = None, **more: Any) -> Any:
        options = {"softmax_scale": 0.1, "causal": True, **more}
        return decode(*args, plan or fake["get_mla_metadata"]()[0], **options)

    call(*good)
    plan = fake["get_mla_metadata"]()[0]
    call(*good, plan=plan)
    two = random(cpu, 2, 2, 8, 576)
    apart = random(cpu, 2, 1, 8, 1152)[..., ::2]
    narrow = random(cpu, 2, 1, 8, 577)[..., :576]
    for args, more, what in (
        ((q.float(), *good[1:]), {}, "16 bits"),
        ((q, pool.half(), *good[2:]), {}, "one type"),
        ((q[..., :512], *good[1:]), {}, "q is"),
        ((apart, *good[1:]), {}, "the last dimension is dense"),
        ((narrow, *good[1:]), {}, "rows on 16 bytes"),
        ((q, pool.view(12, 16, 1, 576), *good[2:]), {}, "blocks are"),
        ((q, pool, blocks.long(), lens, 512), {}, "int32"),
        ((q, pool, blocks + 2, lens, 512), {}, "the pool's blocks"),
        ((q, pool, blocks, lens * 2, 512), {}, "lengths within the tables"),
        ((q, pool, blocks, lens - 1, 512), {"plan": plan}, "lengths that the plan was made for"),
        ((two, *good[1:]), {"plan": plan}, "sizes that the plan was made for"),
        ((two, *good[1:]), {"causal": False}, "several queries are masked causally"),
        (good, {"softmax_scale": None}, "softmax_scale is missing"),
        (good, {"is_fp8_kvcache": True}, "16 bits"),
        (good, {"indices": blocks}, "dense attention"),
    ):
        with pytest.raises(DeviationError, match=what):
            call(*args, **more)
