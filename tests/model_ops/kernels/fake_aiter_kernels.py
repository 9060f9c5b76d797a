"""What each entry point of the fake aiter checks and computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import fake_aiter_collectives
import fake_aiter_latents
import fake_aiter_moe
import fake_aiter_quant
import torch
import torch.nn.functional as F
from fake_aiter_latents import get_cu_num

if TYPE_CHECKING:
    from fake_aiter import Check

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def gemm_a16w16(check: Check) -> torch.Tensor:
    a, b = check.activation("A", "M K", dense="rows"), check.activation("B", "N K")
    bias = check.value("bias")
    if bias is not None:
        check.activation("bias", "N")
    check.that(a.dtype == b.dtype == check.value("otype"), "one type")
    return F.linear(a.float(), b.float(), None if bias is None else bias.float()).to(a.dtype)


def get_GEMM_A16W16_config(check: Check) -> dict[str, Any]:
    """Without a measured kernel, that for small products or torch's."""
    rows, outputs, inputs = (check.value(name) for name in "MNK")
    check.that(check.value("bias") is False, "a product alone")
    types = {str(dtype) for dtype in check.activations}
    check.that(check.value("dtype") == check.value("otype") in types, "names of one type")
    if (rows, outputs, inputs) in check.library.tuned:
        return {"libtype": "asm", "solidx": 1, "kernelName": "measured"}
    units = get_cu_num(check) * (2 if rows == 1 else 1)
    is_small = rows <= 4 and outputs <= units and inputs <= 9216 and inputs % 8 == 0
    return {"libtype": "skinny" if is_small else "torch", "solidx": 2 if is_small else 0}


def wvSpltK(check: Check) -> None:
    weight, x = check.activation("in_a", "M K"), check.activation("in_b", "N K")
    out = check.activation("out_c", "N M")
    outputs, inputs, rows = (check.sizes[name] for name in "MKN")
    check.that(weight.dtype == x.dtype == out.dtype, "one type")
    check.that(weight.device == x.device == out.device, "one device")
    check.that(check.value("N_in") == rows and 1 <= rows <= 4, "one to four rows")
    check.that(inputs % 8 == 0 and outputs >= 7, "whole vectors, and a tile of outputs")
    check.that(inputs * outputs <= 2**32, "weights counted in 32 bits")
    check.that(all(t.data_ptr() % 16 == 0 for t in (weight, x, out)), "vectors on 16 bytes")
    check.that(check.value("CuCount") == get_cu_num(check), "the device's compute units")
    out.copy_(F.linear(x.float(), weight.float()))


def rmsnorm2d_fwd(check: Check) -> torch.Tensor:
    x, weight = check.activation("input", "M N", dense="rows"), check.activation("weight", "N")
    check.that(x.dtype == weight.dtype, "one type")
    return F.rms_norm(x, weight.shape, weight, check.value("epsilon"))


def rmsnorm2d_fwd_with_add(check: Check) -> None:
    x, weight = check.activation("input", "M N", dense="rows"), check.activation("weight", "N")
    residual = check.activation("residual_in", "M N")
    total, out = check.activation("residual_out", "M N"), check.activation("out", "M N")
    total.copy_(x + residual)
    out.copy_(F.rms_norm(total, weight.shape, weight, check.value("epsilon")))


def rope_cached_positions_2c_fwd_inplace(check: Check) -> None:
    x = check.activation("input_x", "1 T X R", dense="last")
    y = check.activation("input_y", "1 T Y R", dense="last")
    tables = [check.tensor(n, "P 1 1 F", torch.float32, x.dtype) for n in ("cos", "sin")]
    positions = check.integers("positions", "1 T", torch.int64)
    check.that(check.sizes["F"] * 2 == check.sizes["R"], "tables serve both halves")
    check.that(check.value("reuse_freqs_front_part") is True, "tables serve both halves")
    check.that(check.value("nope_first") is False, "the rotated part is the first")
    check.that(check.value("rotate_style") == 0, "only halves are rotated here")
    cos, sin = (table[positions[0]].flatten(1)[None, :, None].float() for table in tables)
    for heads in (x, y):
        first, second = heads.float().chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def silu_and_mul(check: Check) -> None:
    x, out = check.activation("input", "M W"), check.activation("out", "M N")
    check.that(check.sizes["W"] == 2 * check.sizes["N"], "gate and up")
    gate, up = x.chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def _stored(check: Check, x: torch.Tensor, pool: torch.Tensor, scale: Any) -> torch.Tensor:
    """x as the pool keeps it; bits, of 8-bit pools."""
    if check.value("kv_cache_dtype") == "auto":
        check.that(pool.dtype == x.dtype, "a cache in the type of what is written")
        return x
    check.that(check.value("kv_cache_dtype") == "fp8" and pool.dtype in FP8, "a cache in 8 bits")
    scaled = x.float() / scale
    # The hardware's conversion does not saturate.
    beyond = scaled.abs() > torch.finfo(pool.dtype).max
    return scaled.masked_fill(beyond, torch.nan).to(pool.dtype).view(torch.uint8)


def _bits(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.uint8) if pool.dtype in FP8 else pool


def reshape_and_cache_flash(check: Check) -> None:
    slots = check.integers("slot_mapping", "T", torch.int64)
    real = slots >= 0
    for name, scale in (("key", "k_scale"), ("value", "v_scale")):
        x = check.activation(name, "T H D", dense="rows")
        pool = check.tensor(f"{name}_cache", "B S H D", x.dtype, *FP8)
        stored = _stored(check, x, pool, check.scale(scale))
        _bits(pool).flatten(0, 1)[slots[real]] = stored[real]


def reshape_and_cache(check: Check) -> None:
    slots = check.integers("slot_mapping", "T", torch.int64)
    check.that(check.value("asm_layout") is True, "values in vectors of tokens")
    key = check.activation("key", "T H D", dense="rows")
    value = check.activation("value", "T H D", dense="rows")
    keys = check.tensor("key_cache", "B H DX S X", key.dtype, *FP8)
    values = check.tensor("value_cache", "B H SX D X", key.dtype, *FP8)
    sizes = check.sizes
    x = sizes["X"]
    check.that(x * keys.dtype.itemsize == 16, "vectors of 16 bytes")
    check.that(sizes["DX"] * x == sizes["D"] and sizes["SX"] * x == sizes["S"], "whole vectors")
    scaled = check.value("kv_cache_dtype") != "auto"
    scales = [check.scale(n) if scaled else check.value(n) for n in ("k_scale", "v_scale")]
    stored = [
        _stored(check, *each) for each in zip((key, value), (keys, values), scales, strict=True)
    ]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, at = divmod(slot, sizes["S"])
            _bits(keys)[block, :, :, at] = stored[0][token].view(sizes["H"], -1, x)
            _bits(values)[block, :, at // x, :, at % x] = stored[1][token]


def concat_and_cache_mla(check: Check) -> None:
    latent = check.activation("kv_c", "T R", dense="rows")
    rope = check.activation("k_pe", "T P", dense="rows")
    pool = check.tensor("kv_cache", "B S W", latent.dtype, *FP8)
    slots = check.integers("slot_mapping", "T", torch.int64)
    check.that(check.sizes["R"] + check.sizes["P"] == check.sizes["W"], "latent and rope fit")
    stored = _stored(check, torch.cat((latent, rope), dim=-1), pool, check.scale("scale"))
    _bits(pool).flatten(0, 1)[slots[slots >= 0]] = stored[slots >= 0]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """`attend_with_sums` that is causal, its result alone."""
    return attend_with_sums(q, k, v, scale, window, True)[0]


def attend_with_sums(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [L, H, D], k [C, KH, D], v [C, KH, DV] -> [L, H, DV], and the logarithms of the sums of
    weights [H, L]; the last query at the last key.

    window: keys that a query sees, itself among them; 0 for all.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("lhd,chd->hlc", q.double(), k) * scale
    last = len(k) - len(q) + torch.arange(len(q), device=q.device)[:, None]
    keys = torch.arange(len(k), device=q.device)
    if causal:
        seen = keys <= last if window == 0 else (keys <= last) & (keys > last - window)
        scores = scores.masked_fill(~seen, float("-inf"))
    out = torch.einsum("hlc,chd->lhd", scores.softmax(dim=-1), v).to(q.dtype)
    return out, scores.logsumexp(dim=-1).float()


def _window(check: Check, *no_sinks: int) -> int:
    window = check.value("window_size")
    check.that(window == (-1, -1, *no_sinks) or window[0] >= 0, "a window or none")
    check.that(window[0] < 0 or window[1:] == (0, *no_sinks), "nothing to the right")
    return window[0] + 1


def _real(pool: torch.Tensor, scale: Any) -> torch.Tensor:
    return pool.float() if scale is None else pool.float() * scale


def unified_attention(check: Check) -> torch.Tensor:
    q, out = check.activation("q", "T H D"), check.activation("out", "T H D")
    if check.value("shuffled_kv_cache"):
        k = check.tensor("k", "B KH DX S X", q.dtype, *FP8)
        v = check.tensor("v", "B KH SX D X", q.dtype, *FP8)
        check.that(check.sizes["S"] <= 64, "a block is a tile")
        k, v = k.permute(0, 3, 1, 2, 4).flatten(3), v.permute(0, 2, 4, 1, 3).flatten(1, 2)
    else:
        k, v = (check.tensor(n, "B S KH D", q.dtype, *FP8) for n in ("k", "v"))
    starts, lens = check.integers("cu_seqlens_q", "N1"), check.integers("seqused_k", "N")
    tables = check.tensor("block_table", "N MB", torch.int32, dense="rows")
    check.that(check.value("causal") is True, "causal")
    check.that(check.value("softcap") == 0.0 and check.value("q_descale") is None, "plain scores")
    check.that(check.sizes["N1"] == check.sizes["N"] + 1, "a start for each sequence")
    lengths = (starts[1:] - starts[:-1]).tolist()
    check.that(check.value("max_seqlen_q") >= max(lengths), "the most queries")
    check.that(check.value("max_seqlen_k") >= int(lens.max()), "the longest context")
    is_8_bits = k.dtype in FP8
    scales = [check.scale(n) if is_8_bits else check.value(n) for n in ("k_descale", "v_descale")]
    check.that(is_8_bits or scales == [None, None], "scales belong to 8 bits")
    window, scale = _window(check), check.value("softmax_scale")
    for b, start in enumerate(starts[:-1].tolist()):
        rows, tokens = slice(start, start + lengths[b]), int(lens[b])
        blocks = tables[b].long()
        key = _real(k, scales[0])[blocks].flatten(0, 1)[:tokens]
        value = _real(v, scales[1])[blocks].flatten(0, 1)[:tokens]
        out[rows] = attend(q[rows], key, value, scale, window)
    return out


def _reduce_partitions(check: Check) -> None:
    """The last step: compiled at the first call, or what is called in its place, which is dead."""
    library = check.library
    if not library.has_compiled_reduce:
        if "flydsl" in library.packages:
            raise TypeError("launch_pa_decode_ps_reduce_flydsl() got an unexpected 'stream'")
        raise AttributeError("'NoneType' object has no attribute 'Stream'")
    for program in ("hipconfig", "hipcc", "make"):
        if program not in library.programs:
            raise FileNotFoundError(f"No such file or directory: {program!r}")


def pa_decode_gluon(check: Check) -> None:
    q, out = check.activation("query", "T H 128"), check.activation("output", "T H 128")
    keys = check.tensor("key_cache", "B KH DX S X", q.dtype, *FP8)
    values = check.tensor("value_cache", "B KH SX 128 X", q.dtype, *FP8)
    lens = check.integers("context_lengths", "N")
    tables = check.tensor("block_tables", "N MB", torch.int32, dense="rows")
    length, sizes = check.value("query_length"), check.sizes
    x = sizes["X"]
    check.that(x * keys.dtype.itemsize == 16, "vectors of 16 bytes")
    check.that(sizes["DX"] * x == 128 and sizes["SX"] * x == sizes["S"], "whole vectors")
    check.that(sizes["S"] in (16, 64, 1024), "a block size that it is compiled for")
    check.that(1 <= length <= 4 and sizes["T"] == sizes["N"] * length, "equally many queries")
    partitions = check.value("max_context_partition_num")
    check.that(partitions >= 1, "a program")
    check.that(length == 1 or partitions == 1, "one query: it skips keys of more")
    check.that(length * (sizes["H"] // sizes["KH"]) <= 64, "at most 64 rows a KV head")
    check.that(check.value("context_partition_size") == 256, "256 tokens a step")
    check.that(check.value("compute_type") == q.dtype and check.value("ps") is True, "as queries")
    is_8_bits = keys.dtype in FP8
    scales = [check.scale(n) if is_8_bits else check.value(n) for n in ("key_scale", "value_scale")]
    check.that(is_8_bits or scales == [None, None], "scales belong to 8 bits")
    _reduce_partitions(check)
    scale = check.value("softmax_scale")
    for b, tokens in enumerate(lens.tolist()):
        blocks, rows = tables[b].long(), slice(b * length, (b + 1) * length)
        key = _real(keys, scales[0])[blocks].permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
        value = _real(values, scales[1])[blocks].permute(0, 2, 4, 1, 3).flatten(0, 2)
        out[rows] = attend(q[rows], key[:tokens], value[:tokens], scale, 0)


def flash_attn_varlen_func(check: Check) -> Any:
    q = check.activation("q", "T H D")
    k, v = check.activation("k", "C KH D"), check.activation("v", "C KH DV")
    starts, key_starts = (check.integers(f"cu_seqlens_{x}", "N1") for x in "qk")
    sizes = check.sizes
    check.that(q.dtype == k.dtype == v.dtype, "one type")
    check.that(sizes["DV"] <= sizes["D"] <= 256, "heads of at most 256, values no wider than keys")
    check.that(int(key_starts[-1]) == sizes["C"] and int(starts[-1]) == sizes["T"], "all rows")
    causal = check.value("causal")
    lengths, key_lengths = (x[1:] - x[:-1] for x in (starts, key_starts))
    check.that(check.value("max_seqlen_q") == int(lengths.max()), "the most queries")
    check.that(check.value("max_seqlen_k") == int(key_lengths.max()), "the most keys")
    window, scale = _window(check, 0), check.value("softmax_scale")
    check.that(causal or window == 0, "a window of causal attention")
    parts = zip(starts[:-1], starts[1:], key_starts[:-1], key_starts[1:], strict=True)
    found = [
        attend_with_sums(q[a:b], k[c:d], v[c:d], scale, window, causal) for a, b, c, d in parts
    ]
    out = torch.cat([part for part, _ in found])
    if not check.value("return_lse"):
        return out
    return out, torch.cat([sums for _, sums in found], dim=1)


# No `pa_*` of aiter's assembly kernels: those are in the signatures so that a call is noticed.
KERNELS: dict[str, Callable[[Any], Any]] = {
    **fake_aiter_collectives.KERNELS,
    **fake_aiter_latents.KERNELS,
    **fake_aiter_moe.KERNELS,
    **fake_aiter_quant.KERNELS,
} | {
    kernel.__name__: kernel
    for kernel in (
        gemm_a16w16,
        get_GEMM_A16W16_config,
        wvSpltK,
        rmsnorm2d_fwd,
        rmsnorm2d_fwd_with_add,
        rope_cached_positions_2c_fwd_inplace,
        silu_and_mul,
        reshape_and_cache_flash,
        reshape_and_cache,
        concat_and_cache_mla,
        unified_attention,
        pa_decode_gluon,
        flash_attn_varlen_func,
    )
}
