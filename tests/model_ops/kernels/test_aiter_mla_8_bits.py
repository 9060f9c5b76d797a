"""aiter's decode of latents in 8 bits against float64 references: over the fake, and over aiter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from aiter_cases import BF16, MI300X, Aiter, check
from fake_aiter import AITER, Call, FakeAiter
from test_aiter_mla import Latents, check_mla, latents

from atom.model_ops.attention.metadata import LatentCacheTensor
from atom.model_ops.kernels import probe
from atom.model_ops.op_table.pool_limits import PoolLimit
from atom.model_ops.registry import Implementation, OpTable, OpUnavailableError, always
from atom.platform import Platform

SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 16, "num_heads": 16}
SIZES |= {"block_size": 64, "num_blocks": 100}
FNUZ = torch.float8_e4m3fnuz


def fp8_of(aiter: Aiter) -> torch.dtype:
    return aiter.ops.platform.fp8_dtype


def calls_of(fake: FakeAiter | None, name: str) -> list[Call]:
    assert fake is not None
    return [call for call in fake.calls if call.name == name]


@pytest.mark.parametrize(
    ("heads", "query_lens", "passes"),
    [
        (8, [1, 1, 1], 1),
        (3, [2, 2], 1),
        (16, [3, 3, 3], 1),
        (8, [4, 4, 4], 1),
        (16, [8, 8], 2),
        (8, [8, 8], 0),  # Triton once, aiter twice
        (8, [1, 3, 2], 0),
    ],
)
def test_decode(aiter: Aiter, heads: int, query_lens: list[int], passes: int) -> None:
    check_mla(aiter, heads, query_lens, [40, 17, 90][: len(query_lens)], 16, fp8_of(aiter))
    if aiter.fake is not None:
        given = {
            (len(call.arguments["kv_last_page_lens"]), call.arguments["max_seqlen_q"])
            for call in calls_of(aiter.fake, "mla_decode_fwd")
        }
        count, length = len(query_lens) * passes, query_lens[0]
        assert given == ({(count, length // passes)} if passes else set())


@pytest.mark.parametrize("queries", [1, 4])
def test_contexts_in_parts(aiter: Aiter, queries: int) -> None:
    """Last parts shorter than the queries, single tokens, and contexts of the queries alone."""
    contexts = [1600, 1537, 515, 16, queries]
    made = latents(aiter, 8, [queries] * 5, contexts, 64, fp8_of(aiter))
    check(made.decode(made.q, made.cache, made.up_proj, made.metadata, 0.1), made.wanted, 2**-5)
    if aiter.fake is not None:
        (call,) = calls_of(aiter.fake, "mla_decode_fwd")
        work = call.arguments["work_info_set"][: int(call.arguments["work_indptr"][-1])]
        assert work[:, 0].bincount().tolist()[0] > 1


def test_a_context_with_one_large_weight(aiter: Aiter) -> None:
    """Far smaller weights count: rounded to 8 bits as they are, all of them would be zeros."""
    made = one_large_weight(aiter)
    check(made.decode(made.q, made.cache, made.up_proj, made.metadata, 0.1), made.wanted, 2**-5)


def one_large_weight(aiter: Aiter) -> Latents:
    """All tokens are alike but the first, whose weight is 20,000 times theirs and whose value is
    zero.
    """
    made = latents(aiter, 8, [1], [640], 64, fp8_of(aiter))
    rows = torch.zeros(640, 576, device=aiter.device)
    rows[1:, :512], rows[0, 512:] = 1, 1
    stored = (rows / made.cache.scale).to(made.cache.latent.dtype).view(torch.uint8)
    tables = made.metadata.block_tables[0].long()
    made.cache.latent.view(torch.uint8)[tables] = stored.view(len(tables), 64, 576)
    q = torch.zeros_like(made.q)
    q[..., 32:] = 99 / 64  # times 0.1 and 64 rotated elements: e^9.9
    up_proj = torch.zeros_like(made.up_proj)
    up_proj[:, 32:] = 2.0**-9
    weights = torch.tensor([9.9] + [0.0] * 639, dtype=torch.float64).softmax(0)
    wanted = torch.full_like(made.wanted, float(weights[1:].sum()))
    return dataclasses.replace(made, q=q, up_proj=up_proj, wanted=wanted)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_each_arch_has_its_own_8_bits(arch: str) -> None:
    fake = FakeAiter(arch=arch)
    with probe.replaced(fake.library):
        aiter = Aiter(OpTable(Platform("rocm", arch, True), AITER), torch.device("cpu"), fake)
        check_mla(aiter, 8, [2, 2], [40, 7], 16, fp8_of(aiter))
    listed = {call.arguments["dtype_kv_nope"] for call in calls_of(fake, "get_mla_metadata_v1")}
    assert listed == {FNUZ if arch == "gfx942" else torch.float8_e4m3fn}


def test_layers_share_the_lists(aiter: Aiter) -> None:
    """The kernel follows addresses: what they lead to is kept as long as the step's metadata."""
    made = latents(aiter, 8, [1, 1], [300, 600], 64, fp8_of(aiter))
    for _ in range(3):
        out = made.decode(made.q, made.cache, made.up_proj, made.metadata, 0.1)
        check(out, made.wanted, 2**-5)
    if aiter.fake is not None:
        assert len(calls_of(aiter.fake, "mla_decode_fwd")) == 3
        assert len(calls_of(aiter.fake, "get_mla_metadata_v1")) == 1


def test_prefill(aiter: Aiter) -> None:
    check_mla(aiter, 8, [20, 33], [20, 40], 16, fp8_of(aiter))


def table(*missing: str) -> tuple[FakeAiter, OpTable]:
    return FakeAiter(missing=missing), OpTable(MI300X, AITER)


@pytest.mark.parametrize("op", ["mla_decode", "mla_write_and_decode"])
@pytest.mark.parametrize(
    ("storage", "changed", "reason"),
    [
        (FNUZ, {"num_heads": 17}, "reads an 8-bit cache for at most 16 heads, not 17"),
        (FNUZ, {"num_blocks": 116_509}, "finds latents within 4 GiB, not in 4.0 GiB of a layer"),
        (BF16, {"num_blocks": 58_255}, "finds latents within 4 GiB, not in 4.0 GiB of a layer"),
        (BF16, {"num_blocks": 100_000}, "not in 6.9 GiB of a layer"),
        (torch.float8_e4m3fn, {}, "keeps a cache in bfloat16 or float8_e4m3fnuz, not"),
    ],
)
def test_what_is_refused(
    op: str, storage: torch.dtype, changed: dict[str, int], reason: str
) -> None:
    fake, ops = table()
    with probe.replaced(fake.library):
        with pytest.raises(OpUnavailableError, match=reason):
            ops.resolve(op, BF16, storage, **{**SIZES, **changed})
        if "num_blocks" in changed and changed["num_blocks"] < 100_000:
            ops.resolve(op, BF16, storage, **{**SIZES, "num_blocks": changed["num_blocks"] - 1})


@pytest.mark.parametrize(("storage", "most"), [(FNUZ, 116_508), (BF16, 58_254)])
def test_a_pool_that_is_too_large(storage: torch.dtype, most: int) -> None:
    """A smaller one is named, for all that aiter would do with it."""
    reason = "finds latents within 4 GiB, not in 6.9 GiB of a layer"
    sizes = {**SIZES, "num_blocks": 100_000 * 2 // storage.itemsize}
    both = "mla_decode", "mla_write_and_decode"
    last = Implementation("torch", always, object)
    ops = OpTable(MI300X, {op: (*AITER[op], last) for op in both})
    with probe.replaced(FakeAiter().library):
        for op in both:
            ops.resolve(op, BF16, storage, **sizes)
        assert ops.pool_limits() == [PoolLimit("aiter", both, reason, most)]


@pytest.mark.parametrize("missing", ["get_mla_metadata_v1", "get_mla_metadata_info_v1"])
@pytest.mark.parametrize("storage", [BF16, FNUZ])
def test_it_takes_an_aiter_with_lists_of_work(missing: str, storage: torch.dtype) -> None:
    fake, ops = table(missing)
    refused = pytest.raises(OpUnavailableError, match=f"no aiter.ops.attention.{missing}")
    with probe.replaced(fake.library), refused:
        ops.resolve("mla_decode", BF16, storage, **SIZES)


def test_the_fake_notices_lists_that_are_gone() -> None:
    fake = FakeAiter()
    with probe.replaced(fake.library):
        aiter = Aiter(OpTable(MI300X, AITER), torch.device("cpu"), fake)
        made = latents(aiter, 8, [1], [40], 16, FNUZ)
        arguments = made.q, LatentCacheTensor(made.cache.latent, made.cache.scale), made.up_proj
        made.decode(*arguments, made.metadata, 0.1)
        (lists,) = [v for k, v in made.metadata._derived.items() if k[0] == "latent work"]
        lists["work_indptr"] = lists["work_indptr"].clone()
        with pytest.raises(AssertionError, match="addresses of lists that are still there"):
            made.decode(*arguments, made.metadata, 0.1)
