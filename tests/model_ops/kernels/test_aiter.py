"""Every aiter adapter against float64 references: over the fake, and over aiter on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_aiter import AITER, ENTRY_POINTS, FakeAiter

from atom.model_ops.kernels.aiter import probe
from atom.model_ops.metadata import AttentionMetadata, KVCacheTensor, LatentCacheTensor
from atom.model_ops.registry import OpTable, OpUnavailableError
from atom.model_ops.routing import Routing
from atom.platform import Platform, current_platform

MI300X = Platform("rocm", "gfx942", True)
BF16 = torch.bfloat16
CACHE_OPS = ("kv_cache_write", "paged_attention", "prefill_attention")
MLA_OPS = ("mla_cache_write", "mla_decode", "mla_prefill")


@dataclass(frozen=True)
class Aiter:
    """Attributes:
    ops: a table of aiter's implementations alone.
    fake: what stands behind them; None when it is aiter itself.
    """

    ops: OpTable
    device: torch.device
    fake: FakeAiter | None

    def called(self, *names: str) -> None:
        """These entry points and no others were called."""
        if self.fake is not None:
            assert self.fake.names == set(names)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def aiter(request: pytest.FixtureRequest) -> Iterator[Aiter]:
    if request.param == "fake":
        fake = FakeAiter()
        with probe.replaced(fake.library):
            yield Aiter(OpTable(MI300X, AITER), torch.device("cpu"), fake)
        return
    platform = current_platform()
    if platform.arch not in ("gfx942", "gfx950"):
        pytest.skip(f"aiter runs on gfx942 and gfx950, this is {platform.arch}")
    if reason := probe.refusal(ENTRY_POINTS["rmsnorm2d_fwd"]):
        pytest.skip(reason)
    yield Aiter(OpTable(platform, AITER), torch.device("cuda"), None)


def random(aiter: Aiter, *shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(aiter.device)


def check(out: torch.Tensor, reference: torch.Tensor, tolerance: float = 2**-6) -> None:
    """Within a few roundings of bfloat16, relative to the largest number."""
    assert out.shape == reference.shape
    error = (out.double() - reference.double()).abs().max() / reference.double().abs().max()
    assert error < tolerance, float(error)


def test_linear(aiter: Aiter) -> None:
    linear = aiter.ops.resolve("linear", BF16, in_features=256, out_features=96)
    weight, bias = random(aiter, 96, 256, seed=1), random(aiter, 96, seed=2)
    for x in (random(aiter, 5, 256), random(aiter, 5, 512)[:, :256], random(aiter, 2, 3, 256)):
        wanted = x.double() @ weight.double().T
        check(linear(x, weight, None), wanted)
        check(linear(x, weight, bias), wanted + bias.double())
    aiter.called("gemm_a16w16")


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def test_rms_norm(aiter: Aiter) -> None:
    rms_norm = aiter.ops.resolve("rms_norm", BF16, size=256)
    weight = random(aiter, 256, seed=1)
    for x in (random(aiter, 5, 256), random(aiter, 5, 320)[:, :256], random(aiter, 5, 4, 256)):
        before = x.clone()
        check(rms_norm(x, weight, 1e-5), norm(x, weight))
        assert torch.equal(x, before)
    aiter.called("rmsnorm2d_fwd")


def test_add_rms_norm(aiter: Aiter) -> None:
    add_rms_norm = aiter.ops.resolve("add_rms_norm", BF16, size=256)
    x, residual, weight = random(aiter, 5, 256), random(aiter, 5, 256, seed=1), random(aiter, 256)
    before = x.clone(), residual.clone()
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    check(total, x.double() + residual.double())
    check(out, norm(total, weight), 2**-5)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    aiter.called("rmsnorm2d_fwd_with_add")


def test_silu_and_mul(aiter: Aiter) -> None:
    silu_and_mul = aiter.ops.resolve("silu_and_mul", BF16, size=256)
    x = random(aiter, 5, 512)
    check(silu_and_mul(x), F.silu(x[:, :256].double()) * x[:, 256:].double())
    aiter.called("silu_and_mul")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [128, 64])
def test_rope(aiter: Aiter, interleaved: bool, rotary_dim: int) -> None:
    rope = aiter.ops.resolve("rope", BF16, head_dim=128)
    fused = random(aiter, 5, 7, 128)
    q, k = fused[:, :4], fused[:, 4:6]
    angles = torch.rand(40, rotary_dim // 2, device=aiter.device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([3, 39, 0, 7, 7], device=aiter.device)
    before = fused.clone()
    rotated = rope(positions, q, k, cos_sin, interleaved)
    for x, out in zip((q, k), rotated, strict=True):
        if interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        first, second = x[..., :rotary_dim].double().chunk(2, dim=-1)
        cos, sin = (f(angles[positions][:, None].double()) for f in (torch.cos, torch.sin))
        halves = first * cos - second * sin, second * cos + first * sin
        check(out, torch.cat((*halves, x[..., rotary_dim:].double()), dim=-1))
    assert torch.equal(fused, before)
    aiter.called("rope_cached_positions_2c_fwd_inplace")


def batch(
    aiter: Aiter, query_lens: list[int], context_lens: list[int], block_size: int, width: int
) -> AttentionMetadata:
    """Sequences whose blocks lie scattered in a pool; every token but the first is written."""
    blocks = torch.randperm(len(query_lens) * width, generator=torch.Generator().manual_seed(3))
    tables = blocks.view(len(query_lens), width).int()
    slots = []
    for table, queries, context in zip(tables.tolist(), query_lens, context_lens, strict=True):
        positions = range(context - queries, context)
        slots += [table[p // block_size] * block_size + p % block_size for p in positions]
    starts = F.pad(torch.tensor(query_lens).cumsum(0), (1, 0)).int()
    return AttentionMetadata(
        slot_mapping=torch.tensor(slots, device=aiter.device),
        block_tables=tables.to(aiter.device),
        block_counts=torch.full((len(query_lens),), width, dtype=torch.int32, device=aiter.device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=aiter.device),
        cu_seqlens_q=starts.to(aiter.device),
        max_seqlen_q=max(query_lens),
        max_context_len=max(context_lens) + 3,
        query_lens_cpu=tuple(query_lens),
        context_lens_cpu=tuple(context_lens),
    )


def unknown_lengths(metadata: AttentionMetadata) -> AttentionMetadata:
    return replace(metadata, context_lens_cpu=None)


def all_slots(metadata: AttentionMetadata, block_size: int) -> list[torch.Tensor]:
    """Each sequence's slots, in the order of its tokens."""
    offsets = torch.arange(block_size, device=metadata.block_tables.device)
    slots = (metadata.block_tables[:, :, None] * block_size + offsets).flatten(1)
    return [row[:n] for row, n in zip(slots, metadata.context_lens.tolist(), strict=True)]


def attention(
    q: torch.Tensor,
    rows: list[tuple[torch.Tensor, torch.Tensor]],
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """float64: q [T, H, D] over each sequence's keys and values [C, KH, D]."""
    out = []
    for part, (k, v) in zip(q.double().split(metadata.query_lens_cpu), rows, strict=True):
        group = part.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("lhd,chd->hlc", part, k) * scale
        distance = torch.arange(len(part), device=q.device)[:, None] + len(k) - len(part)
        distance = distance - torch.arange(len(k), device=q.device)
        hidden = (distance < 0) | (distance >= (window or len(k)))
        out.append(
            torch.einsum("hlc,chd->lhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        )
    return torch.cat(out)


@dataclass(frozen=True)
class Layer:
    """An attention layer, its cache, and what was written to it.

    Attributes:
        rows: each sequence's keys and values.
    """

    metadata: AttentionMetadata
    cache: KVCacheTensor
    decode: Any
    prefill: Any
    q: torch.Tensor
    rows: list[tuple[torch.Tensor, torch.Tensor]]


def layer(
    aiter: Aiter,
    heads: tuple[int, int],
    query_lens: list[int],
    context_lens: list[int],
    storage: torch.dtype | None = None,
    block_size: int = 16,
    sliding_window: int = 0,
    head_dim: int = 128,
) -> Layer:
    """Writes every token of every sequence, in an order of its own."""
    width = -(-max(context_lens) // block_size)
    metadata = batch(aiter, query_lens, context_lens, block_size, width)
    num_blocks = len(query_lens) * width + 1
    storage = storage or BF16
    pools = torch.zeros(2, num_blocks, block_size, heads[1], head_dim, device=aiter.device).to(
        storage
    )
    is_8_bits = storage.itemsize == 1
    scales = [torch.tensor([x], device=aiter.device) for x in (0.03, 0.05)] if is_8_bits else ()
    cache = KVCacheTensor(pools[0], pools[1], *scales)
    write, decode, prefill = aiter.ops.resolve_together(
        CACHE_OPS,
        BF16,
        storage,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        sliding_window=sliding_window,
    )
    slots = torch.cat(all_slots(metadata, block_size))
    # As they leave a fused projection: rows apart. The last token is padding.
    fused = random(aiter, len(slots) + 1, 2 * heads[1], head_dim, seed=5)
    k, v = fused[:, : heads[1]], fused[:, heads[1] :]
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(6)).to(aiter.device)
    index = F.pad(order, (0, 1), value=len(slots))
    padded = F.pad(slots[order], (0, 1), value=-1)
    shuffled = fused[index]
    write(shuffled[:, : heads[1]], shuffled[:, heads[1] :], cache, padded)
    kept = [
        _as_kept(x[: len(slots)], storage, s)
        for x, s in zip((k, v), scales or (None, None), strict=True)
    ]
    rows = list(zip(*(x.split(context_lens) for x in kept), strict=True))
    q = random(aiter, sum(query_lens), heads[0], head_dim, seed=7)
    return Layer(metadata, cache, decode, prefill, q, rows)


def _as_kept(x: torch.Tensor, storage: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return x
    limit = torch.finfo(storage).max
    return (x.float() / scale).clamp(-limit, limit).to(storage).double() * scale


def check_layer(made: Layer, window: int | None = None, decode: bool = True) -> None:
    wanted = attention(made.q, made.rows, made.metadata, 0.1, window)
    arguments = made.q, made.cache
    if decode:
        for metadata in (made.metadata, unknown_lengths(made.metadata)):
            check(made.decode(*arguments, metadata, 0.1, window), wanted)
    check(made.prefill(*arguments, made.metadata, 0.1, window), wanted)


@pytest.mark.parametrize("heads", [(8, 2), (4, 1)])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 3, 3], [1, 5, 2]])
def test_grouped_layers(
    aiter: Aiter, heads: tuple[int, int], block_size: int, query_lens: list[int]
) -> None:
    check_layer(layer(aiter, heads, query_lens, [40, 7, 90], block_size=block_size, head_dim=64))
    aiter.called("reshape_and_cache_flash", "unified_attention")


def test_prefill_gathers_where_most_tokens_are_new(aiter: Aiter) -> None:
    check_layer(layer(aiter, (8, 2), [30, 17, 1], [40, 17, 5]), decode=False)
    aiter.called("reshape_and_cache_flash", "flash_attn_varlen_func")


@pytest.mark.parametrize(("query_lens", "decode"), [([2, 1, 3], True), ([37, 20, 1], False)])
def test_windows(aiter: Aiter, query_lens: list[int], decode: bool) -> None:
    made = layer(aiter, (8, 2), query_lens, [40, 33, 5], sliding_window=9)
    check_layer(made, window=9, decode=decode)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [4, 4, 4], [6, 6, 6], [1, 5, 2]])
def test_layers_with_a_query_head_a_kv_head_are_packed(
    aiter: Aiter, block_size: int, query_lens: list[int]
) -> None:
    check_layer(layer(aiter, (2, 2), query_lens, [40, 7, 300], block_size=block_size))
    decoded = query_lens[0] <= 4 and len(set(query_lens)) == 1
    gluon = ["pa_decode_gluon"] if decoded else []
    aiter.called("reshape_and_cache", "unified_attention", *gluon)


def test_packed_prefill_gathers_where_most_tokens_are_new(aiter: Aiter) -> None:
    check_layer(layer(aiter, (2, 2), [30, 17, 1], [40, 17, 5]), decode=False)
    aiter.called("reshape_and_cache", "flash_attn_varlen_func")


@pytest.mark.parametrize("heads", [(8, 2), (2, 2)])
def test_caches_in_8_bits(aiter: Aiter, heads: tuple[int, int]) -> None:
    storage = aiter.ops.platform.fp8_dtype
    check_layer(layer(aiter, heads, [1, 3], [40, 19], storage), decode=True)
    check_layer(layer(aiter, heads, [40, 19], [40, 19], storage), decode=False)


def test_mla_heads_are_padded(aiter: Aiter) -> None:
    for heads, padded in ((8, 16), (16, 16), (24, 32), (128, 128)):
        check_mla(aiter, heads, [1, 1], [40, 7])
        if aiter.fake is not None:
            assert aiter.fake.calls[-2].arguments["q"].shape[1] == padded


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 3, 3], [5, 5, 5], [1, 5, 2], [30, 7, 70]])
def test_mla(aiter: Aiter, query_lens: list[int]) -> None:
    check_mla(aiter, 8, query_lens, [40, 7, 90])
    decoded = ["mla_decode_fwd"] if max(query_lens) <= 16 else []
    aiter.called("concat_and_cache_mla", "flash_attn_varlen_func", *decoded)


def check_mla(aiter: Aiter, heads: int, query_lens: list[int], context_lens: list[int]) -> None:
    nope, v_dim = 32, 16
    width = -(-max(context_lens) // 16)
    metadata = batch(aiter, query_lens, context_lens, 16, width)
    pool = random(aiter, len(query_lens) * width + 1, 16, 576, seed=1)
    cache = LatentCacheTensor(pool)
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": v_dim, "num_heads": heads}
    sizes |= {"block_size": 16, "num_blocks": len(pool)}
    write, decode, prefill = aiter.ops.resolve_together(MLA_OPS, BF16, BF16, **sizes)
    count = len(metadata.slot_mapping)
    latent, k_rope = random(aiter, count, 512, seed=2), random(aiter, count, 96, seed=3)[:, :64]
    write(latent, k_rope, cache, metadata.slot_mapping)
    written = pool.flatten(0, 1)[metadata.slot_mapping]
    assert torch.equal(written, torch.cat((latent, k_rope), dim=-1))
    up_proj = random(aiter, heads, nope + v_dim, 512, seed=4) * 512**-0.5
    q = random(aiter, count, heads, nope + 64, seed=5)
    rows = []
    for slots in all_slots(metadata, 16):
        tokens = pool.flatten(0, 1)[slots].double()
        both = torch.einsum("cr,hnr->chn", tokens[:, :512], up_proj.double())
        shared = tokens[:, None, 512:].expand(-1, heads, -1)
        rows.append((torch.cat((both[..., :nope], shared), dim=-1), both[..., nope:]))
    wanted = attention(q, rows, metadata, 0.1)
    if max(query_lens) <= 16:
        for each in (metadata, unknown_lengths(metadata)):
            check(decode(q, cache, up_proj, each, 0.1), wanted, 2**-5)
    check(prefill(q, cache, up_proj, metadata, 0.1), wanted, 2**-5)


def test_latents_in_8_bits(aiter: Aiter) -> None:
    """Written and prefilled; decode needs queries in 8 bits too, and says so."""
    storage = aiter.ops.platform.fp8_dtype
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 16, "num_heads": 8}
    sizes |= {"block_size": 16, "num_blocks": 4}
    with pytest.raises(OpUnavailableError, match="8-bit queries"):
        aiter.ops.resolve("mla_decode", BF16, storage, **sizes)
    metadata = batch(aiter, [20], [20], 16, 2)
    pool = torch.zeros(4, 16, 576, device=aiter.device).to(storage)
    cache = LatentCacheTensor(pool, torch.tensor([0.05], device=aiter.device))
    latent, k_rope = random(aiter, 20, 512), random(aiter, 20, 64, seed=1)
    write = aiter.ops.resolve("mla_cache_write", BF16, storage, **sizes)
    write(latent, k_rope, cache, metadata.slot_mapping)
    kept = _as_kept(torch.cat((latent, k_rope), dim=-1), storage, cache.scale)
    up_proj, q = random(aiter, 8, 48, 512) * 512**-0.5, random(aiter, 20, 8, 96)
    both = torch.einsum("cr,hnr->chn", kept[:, :512], up_proj.double())
    keys = torch.cat((both[..., :32], kept[:, None, 512:].expand(-1, 8, -1)), dim=-1)
    prefill = aiter.ops.resolve("mla_prefill", BF16, storage, **sizes)
    wanted = attention(q, [(keys, both[..., 32:])], metadata, 0.1)
    check(prefill(q, cache, up_proj, metadata, 0.1), wanted, 2**-5)


def test_prefill_of_unknown_lengths_is_an_error(aiter: Aiter) -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 16, "num_heads": 8}
    sizes |= {"block_size": 16, "num_blocks": 4}
    prefill = aiter.ops.resolve("mla_prefill", BF16, BF16, **sizes)
    metadata = unknown_lengths(batch(aiter, [20], [20], 16, 2))
    cache = LatentCacheTensor(random(aiter, 4, 16, 576))
    with pytest.raises(ValueError, match="the host must know the context lengths"):
        prefill(random(aiter, 20, 8, 96), cache, random(aiter, 8, 48, 512), metadata, 0.1)


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
    assert ids.dtype == torch.int64
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


def test_moe_experts(aiter: Aiter) -> None:
    sizes = {"num_experts": 8, "hidden_size": 256, "intermediate_size": 128}
    experts = aiter.ops.resolve("moe_experts", BF16, **sizes)
    w13 = random(aiter, 8, 256, 256, seed=1) / 16
    w2 = random(aiter, 8, 256, 128, seed=2) / 8
    for tokens in (1, 37):
        x = random(aiter, tokens, 256, seed=3)
        ids = torch.stack([torch.randperm(8)[:3] for _ in range(tokens)]).to(aiter.device)
        weights = torch.rand(tokens, 3, device=aiter.device)
        wanted = torch.zeros(tokens, 256, dtype=torch.float64, device=aiter.device)
        for token in range(tokens):
            for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
                gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
                wanted[token] += weight * (w2[expert].double() @ (F.silu(gate) * up))
        check(experts(x, w13, w2, weights, ids), wanted, 2**-5)
    aiter.called("fused_moe")
