"""What the fake aiter's routing and experts check and compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from fake_aiter_layouts import (
    packed_int4,
    paired_scale,
    shuffled_weight,
    unpacked_int4,
    unshuffled_scale,
    unshuffled_weight,
)
from fake_aiter_quant import (
    E8M0,
    FP4,
    QuantType,
    fp8_of,
    numbers_of_fp4,
    quantise,
    quantise_fp4,
)

if TYPE_CHECKING:
    from fake_aiter import Check, FakeAiter

# Groups of 32, as those of MXFP4.
INT4 = "per_1x32 of int4"


def _outputs(check: Check, ids: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    weights = check.tensor("topk_weights", "T K", torch.float32)
    return weights, check.integers(ids, "T K"), check.sizes["K"]


def _best_groups(check: Check, choice: torch.Tensor, best: int) -> torch.Tensor:
    """`choice` with everything outside of each row's best groups at 0."""
    groups = check.value("num_expert_group")
    check.that(groups in (1, 2, 4, 8), "numbers of groups that it is compiled for")
    grouped = choice.view(len(choice), groups, -1)
    scores = grouped.topk(min(best, grouped.shape[2]), dim=-1).values.sum(-1)
    chosen = scores.topk(check.value("topk_group"), dim=-1).indices
    mask = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
    return (grouped * mask[..., None]).flatten(1)


def _choose(check: Check, ids_name: str, scores: torch.Tensor, choice: torch.Tensor) -> None:
    weights, ids, k = _outputs(check, ids_name)
    chosen = choice.topk(k, dim=-1).indices
    kept = scores.gather(1, chosen)
    if check.value("need_renorm"):
        kept = kept / kept.sum(-1, keepdim=True)
    weights.copy_(kept)
    ids.copy_(chosen)


def biased_grouped_topk(check: Check) -> None:
    logits = check.tensor("gating_output", "T E", torch.float32)
    bias = check.tensor("correction_bias", "E", torch.float32)
    scores = logits.sigmoid()
    _choose(check, "topk_ids", scores, _best_groups(check, scores + bias, 2))
    check.value("topk_weights").mul_(check.value("routed_scaling_factor"))


def grouped_topk(check: Check) -> None:
    logits = check.tensor("gating_output", "T E", torch.float32)
    scores = logits.softmax(-1) if check.value("is_softmax") else logits.sigmoid()
    _choose(check, "topk_ids", scores, _best_groups(check, scores, 1))
    check.value("topk_weights").mul_(check.value("routed_scaling_factor"))


def topk_softmax(check: Check) -> None:
    scores = check.tensor("gating_output", "T E", torch.float32).softmax(-1)
    check.integers("token_expert_indices", "T K")
    _choose(check, "topk_indices", scores, scores)


def shuffle_weight(check: Check) -> torch.Tensor:
    x = check.value("x")
    check.that(x.dim() in (2, 3) and check.value("layout") == (16, 16), "the layout of all kernels")
    check.that(x.shape[-2] % 16 == 0 and x.shape[-1] % 32 == 0, "whole tiles")
    out = shuffled_weight(x)
    out.is_shuffled = True  # type: ignore[attr-defined]
    return out


def pack_int8_to_packed_int4(check: Check) -> torch.Tensor:
    x = check.value("x_shuf_i8")
    check.that(x.dtype == torch.int8 and x.numel() % 8 == 0, "whole eights of numbers")
    check.that(int(x.min()) >= -8 and int(x.max()) < 8, "numbers of four bits")
    return packed_int4(x.flatten())


def shuffle_scale_for_int4(check: Check) -> torch.Tensor:
    scale = check.tensor("scale", "E G N", torch.bfloat16)
    check.that(check.value("group_size") == 32 and scale.shape[1] % 2 == 0, "pairs of groups")
    return paired_scale(scale)


def is_flydsl_available(check: Check) -> bool:
    return "flydsl" in check.library.packages


def _int4_experts(check: Check, name: str) -> torch.Tensor:
    """Rounded to bfloat16, as they are multiplied."""
    check.that(is_flydsl_available(check), "flydsl's kernels")
    stored = check.tensor(name, "E W H/2" if name == "w1" else "E H I/2", torch.int4)
    count, rows, size = *stored.shape[:2], 2 * stored.shape[2]
    check.that(stored.numel() < 2**32, "bytes counted in 32 bits")
    numbers = unpacked_int4(stored.view(torch.uint8).flatten()).view(count, rows, size)
    groups = size // 32
    scale = check.tensor(f"{name}_scale", f"{count * rows * groups}", torch.bfloat16)
    by_group = scale.view(count, groups // 2, rows, 2).transpose(2, 3).reshape(count, groups, rows)
    spread = by_group.transpose(1, 2).repeat_interleave(32, dim=-1)
    return (unshuffled_weight(numbers).float() * spread.float()).to(torch.bfloat16).float()


def _experts(check: Check, name: str, kind: str) -> torch.Tensor:
    """float32 [E, N, K]: what a kernel makes of `w1` or `w2`.

    16-bit and FP8 kernels read weights as shuffled, marked or not; those of MXFP4 if marked.
    """
    shape = "E W H" if name == "w1" else "E H I"
    if kind == "No":
        return unshuffled_weight(check.activation(name, shape)).float()
    scale_name = f"{name}_scale"
    if kind == INT4:
        return _int4_experts(check, name)
    if kind == "per_1x32":
        check.that(check.library.arch == "gfx950", "MXFP4 is gfx950's")
        halved = "E W H/2" if name == "w1" else "E H I/2"
        codes = check.tensor(name, halved, FP4)
        count, rows, size = *codes.shape[:2], 2 * codes.shape[2]
        check.that(size % 256 == 0 and count * rows % 256 == 0, "whole tiles of scales")
        scale = check.tensor(scale_name, f"{count * rows} {size // 32}", E8M0).view(torch.uint8)
        stored = codes.view(torch.uint8)
        stored = unshuffled_weight(stored) if getattr(codes, "is_shuffled", False) else stored
        return numbers_of_fp4(stored, unshuffled_scale(scale).view(count, rows, -1))
    codes = unshuffled_weight(check.tensor(name, shape, fp8_of(check.library.arch)))
    count, rows, size = codes.shape
    if kind == "per_Token":
        return codes.float() * check.tensor(scale_name, f"{count} {rows} 1", torch.float32)
    check.that(kind == "per_128x128" and rows % 128 == size % 128 == 0, "whole blocks")
    blocks = check.tensor(scale_name, f"{count} {rows // 128} {size // 128}", torch.float32)
    return codes.float() * blocks.repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)


def _rounded(x: torch.Tensor, kind: str, arch: str) -> torch.Tensor:
    """Inputs as a kernel quantises them."""
    if kind == "No":
        return x.float()
    if kind == INT4:
        return x.to(torch.bfloat16).float()
    if kind == "per_1x32":
        return numbers_of_fp4(*quantise_fp4(x))
    group = 0 if kind == "per_Token" else 128
    codes, scale = quantise(x, fp8_of(arch), group)
    return codes.float() * scale.repeat_interleave(group or x.shape[-1], dim=-1)


def _row(
    library: FakeAiter, tokens: int, sizes: tuple[int, int, int], choices: int, is_ep: bool
) -> tuple[str, str] | None:
    """What the table names for so many tokens. With a mask one choice is thought to be appended."""
    padded = 1 << (tokens - 1).bit_length()
    return library.tuned_experts.get((padded, *sizes, choices - is_ep))


def _kernel_of_a_stage() -> None: ...


def get_2stage_cfgs(check: Check) -> SimpleNamespace:
    """Parts that say as `kernelName` what they run; ports of MXFP4 have names of their own."""
    sizes = tuple(check.value(name) for name in ("model_dim", "inter_dim", "expert"))
    tokens, choices, is_ep = (check.value(name) for name in ("token", "topk", "is_ep"))
    check.that(choices > is_ep, "a choice")
    types = check.value("q_dtype_a"), check.value("q_dtype_w")
    dtype, fp8, kind = check.value("dtype"), fp8_of(check.library.arch), check.value("q_type")
    wanted = {"No": ((dtype, dtype),), "per_1x32": ((FP4, FP4), (dtype, torch.int4))}
    check.that(kind.name in ("No", "per_Token", "per_1x128", "per_1x32"), "as the table has it")
    check.that(types in wanted.get(kind.name, ((fp8, fp8),)), "types of the format")
    check.that(check.value("use_g1u1") is True and check.value("activation").name == "Silu", "MLPs")
    no = [check.value(name) for name in ("doweight_stage1", "hidden_pad", "intermediate_pad")]
    check.that(no == [False, 0, 0], "nothing else")
    first, second = _row(check.library, tokens, sizes, choices, is_ep) or ("", "")
    is_port = "mxmoe" in first
    return SimpleNamespace(
        stage1=partial(_kernel_of_a_stage, **{"kernelName1" if is_port else "kernelName": first}),
        stage2=partial(_kernel_of_a_stage, **{"kernelName2" if is_port else "kernelName": second}),
    )


def stage2_uses_route_reduce(check: Check) -> bool:
    return "_reduce" in check.value("stage2").keywords.get("kernelName", "")


def _look_up(check: Check, sizes: tuple[int, int, int]) -> None:
    """As aiter does: what the table names is started, whether it is there or not."""
    library, mask = check.library, check.value("expert_mask")
    tokens, choices = check.sizes["T"], check.sizes["K"]
    row = _row(library, tokens, sizes, choices, mask is not None)
    library.seen_experts.append(row)
    if any("mxmoe" in name for name in row or ()) and mask is not None:
        raise NotImplementedError("MXFP4 a4w4 FlyDSL port does not support expert-parallel yet")
    if any(name.startswith("flydsl_") for name in row or ()) and "flydsl" not in library.packages:
        raise ModuleNotFoundError("No module named 'flydsl'")


def _check_last_choice(check: Check, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """aiter's callers append a choice that is masked."""
    mask = check.value("expert_mask")
    check.that(not int(mask[-1]), "a mask of 0 at its end")
    check.that(bool((ids[:, -1] == len(mask) - 1).all()), "a choice of the last id at the end")
    check.that(not weights[:, -1].any(), "a choice without a weight at the end")


def fused_moe(check: Check) -> torch.Tensor:
    x = check.activation("hidden_states", "T H")
    weights = check.tensor("topk_weight", "T K", torch.float32)
    ids = check.integers("topk_ids", "T K")
    chosen = check.value("quant_type")
    kind, arch = chosen.name if isinstance(chosen, QuantType) else "No", check.library.arch
    if kind == "per_1x32" and check.value("w1").dtype == torch.int4:
        kind = INT4
    w1, w2 = _experts(check, "w1", kind), _experts(check, "w2", kind)
    hidden, inter = w1.shape[2], w2.shape[2]
    check.that(w1.shape[1] == 2 * inter and w2.shape[1] == hidden, "gate above up")
    step = {"No": 64, "per_1x32": 256}.get(kind, 128)
    check.that(hidden % step == 0 and inter % step == 0, "whole steps")
    inputs = _rounded(x, kind, arch)
    out = torch.zeros_like(x, dtype=torch.float32)
    held = list(range(len(w1)))
    if check.value("expert_mask") is not None:
        held = check.integers("expert_mask", "G").nonzero()[:, 0].tolist()
        check.that(len(held) == len(w1), "as many ids in the mask as experts")
        _check_last_choice(check, ids, weights)
    _look_up(check, (hidden, inter, len(w1)))
    for expert, id in enumerate(held):
        tokens, place = (ids == id).nonzero(as_tuple=True)
        gate, up = F.linear(inputs[tokens], w1[expert]).chunk(2, dim=-1)
        between = _rounded(F.silu(gate) * up, kind, arch)
        out.index_add_(0, tokens, F.linear(between, w2[expert]) * weights[tokens, place, None])
    return out.to(x.dtype)


KERNELS: dict[str, Callable[[Any], Any]] = {
    kernel.__name__: kernel
    for kernel in (
        biased_grouped_topk,
        grouped_topk,
        topk_softmax,
        shuffle_weight,
        pack_int8_to_packed_int4,
        shuffle_scale_for_int4,
        is_flydsl_available,
        get_2stage_cfgs,
        stage2_uses_route_reduce,
        fused_moe,
    )
}
