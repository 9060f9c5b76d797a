"""Counts kernels that would be launched, on tensors that hold no data.

Layers and heads of published sizes run with the ops that the table chooses for a GPU.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lone_rank import LoneCollectives
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV3Config, LlamaConfig

from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.model_ops.kernels import probe
from atom.model_ops.kernels import triton as triton_kernels
from atom.model_ops.kernels.torch import linear
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpTable
from atom.platform import Platform, current_platform

BATCH, CONTEXT, BLOCK_SIZE = 8, 8192, 64
# Compute units of an H200, an MI300X and an MI355X.
UNITS = {"sm90": 132, "gfx942": 304, "gfx950": 256}
# Entry points of aiter's that these layers need not call, but whose absence changes choices.
KINDS = ("No", "per_1x32", "per_1x128", "per_128x128")
UNUSED = (
    *("grouped_topk", "topk_softmax", "concat_and_cache_mla"),
    *("rope_cached_positions_2c_fwd_inplace", "flash_attn_varlen_func"),
)
META = torch.device("meta")
LLAMA = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_hidden_layers=2,
)
KIMI = DeepseekV3Config(
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=2,
    num_attention_heads=64,
    num_key_value_heads=64,
    n_routed_experts=384,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=1,
)


class Launches(TorchDispatchMode):
    """Lists kernels instead of running them.

    Attributes:
        names: of Triton's kernels, and of torch's operations that launch one, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # such as `to` and `contiguous`, which may copy or not
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        name = func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or name in ("detach", "_unsafe_view")):
            self.names += [str(func)] * _kernels_of(name, args)
        if func is torch.ops.aten.mm.dtype:  # which has no shape function
            x, weight, dtype = args
            return x.new_empty(x.shape[0], weight.shape[1], dtype=dtype)
        return func(*args, **kwargs)

    def launched(self, kernel: Any) -> None:
        self.names.append(f"triton {kernel.fn.__name__}")


def _kernels_of(name: str, args: Any) -> int:
    """How many an operation launches: one, and of copies of several tensors one for each type."""
    if name != "_foreach_copy_":
        return 1
    return len({(to.dtype, of.dtype) for to, of in zip(*args[:2], strict=True)})


class CountedCollectives(LoneCollectives):
    """Each is a kernel."""

    def __init__(self, seen: Launches) -> None:
        super().__init__()
        self._seen = seen

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._seen.names.append("all_reduce")

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._seen.names.append("all_gather")

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._seen.names.append("broadcast")


def rank_of(size: int, seen: Launches) -> ParallelGroup:
    """The first rank of so many, which chooses tokens, all on one machine."""
    if size == 1:
        return SINGLE
    return ParallelGroup(0, size, CountedCollectives(seen), peer_access=True)


def count_triton(seen: Launches, patch: pytest.MonkeyPatch) -> None:
    """Triton's kernels are listed from now on, and not run."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for kind in (InterpretedFunction, JITFunction):
        patch.setattr(kind, "run", lambda kernel, *_, **__: seen.launched(kernel))


def of_moe(_: torch.Tensor, w13: torch.Tensor, *__: Any, **given: Any) -> int:
    """Tokens sorted by one kernel, up to some 40 of them with 385 experts, and two products. In FP8
    blocks inputs of both are quantised: `fused_moe_2stages`, which runs up to 32 tokens. Of experts
    that eight ranks cut it splits the inputs, which is two more. In int4 inputs stay as they are.
    """
    if given.get("quant_type") in (None, "per_1x32"):
        return 3
    return 5 if w13.shape[1] == 2 * KIMI.moe_intermediate_size else 7


def of_latents(*_: torch.Tensor, **given: Any) -> int:
    """aiter/mla.py: `torch.full` for the numbers of splits that have keys, the assembly kernel, and
    `_fwd_kernel_stage2_asm`, which joins the splits; with lists of work, no fill.
    """
    return 2 if "work_meta_data" in given else 3


# How many kernels a call of aiter's of 2026-08-22 launches at the sizes of these tests.
AITER_LAUNCHES: Mapping[str, int | Callable[..., int]] = {
    # aiter/tuned_gemm.py: the library's product where no other is tuned.
    "gemm_a16w16": 1,
    # aiter/ops/gemm_op_a8w8.py: one kernel of CK's.
    "gemm_a8w8_blockscale": 1,
    "per_group_quant_hip": 1,
    "rmsnorm2d_fwd": 1,
    "rmsnorm2d_fwd_with_add": 1,
    "silu_and_mul": 1,
    "biased_grouped_topk": 1,  # aiter/ops/topk.py
    "mla_decode_fwd": of_latents,
    # csrc/kernels/mla/metadata.cu
    "get_mla_metadata_v1": 1,
    # aiter/fused_moe.py, csrc/include/moe_sorting_opus.h.
    "fused_moe": of_moe,
}


def aiter(arch: str, seen: Launches) -> probe.Library:
    """Functions that return what an adapter goes on with, and count what they would launch."""

    def product(x: torch.Tensor, weight: torch.Tensor, *_: Any, **given: Any) -> torch.Tensor:
        dtype = given.get("dtype") or given["otype"]
        return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)

    def quantised(x: torch.Tensor, *_: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        codes = x.new_empty(x.shape, dtype=given["quant_dtype"])
        return codes, x.new_empty(x.shape[0], x.shape[1] // 128, dtype=torch.float32)

    def same(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return x

    def sizes(*_: Any, **__: Any) -> tuple[tuple[int, torch.dtype], ...]:
        return ((1, torch.int32),) * 6

    results: dict[str, Any] = {
        "gemm_a16w16": product,
        "gemm_a8w8_blockscale": product,
        "per_group_quant_hip": quantised,
        "rmsnorm2d_fwd": same,
        "fused_moe": same,
    }

    def counted(name: str) -> Callable[..., Any]:
        launches = AITER_LAUNCHES[name]

        def call(*args: Any, **given: Any) -> Any:
            count = launches if isinstance(launches, int) else launches(*args, **given)
            seen.names += [f"aiter {name} {i}/{count}" for i in range(1, count + 1)]
            return results.get(name, lambda *_, **__: None)(*args, **given)

        return call

    loading: dict[str, Any] = dict.fromkeys(
        ("shuffle_weight", "e8m0_shuffle", "shuffle_scale_for_int4"), same
    )
    loading["pack_int8_to_packed_int4"] = lambda x, *_: x.new_empty(x.numel() // 2)
    asked = {
        "get_gfx": lambda: arch,
        "get_mla_metadata_info_v1": sizes,
        "get_cu_num": lambda: UNITS[arch],
        "get_GEMM_A16W16_config": lambda *_: {"libtype": "torch"},
        "QuantType": type("QuantType", (), {name: name for name in KINDS}),
        "is_flydsl_available": lambda: True,
        "ActivationType": type("ActivationType", (), {"Silu": 0}),
        "get_2stage_cfgs": lambda *_, **__: SimpleNamespace(stage1=partial(len), stage2=None),
        "stage2_uses_route_reduce": lambda stage2: stage2,
        "wvSpltK": None,  # for up to 4 rows
    }
    functions = {name: counted(name) for name in AITER_LAUNCHES} | loading | asked
    functions |= dict.fromkeys(UNUSED, lambda *_, **__: pytest.fail("not counted"))
    return probe.Library(lambda _: functions)


def of_a_gpu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`logits` of rows on a GPU; it asks where they are, and these are nowhere."""
    return torch.mm(x, weight.T, out_dtype=torch.float32)


def context_for(
    arch: str,
    ops: Mapping[str, Any],
    patch: pytest.MonkeyPatch,
    group: ParallelGroup = SINGLE,
) -> LayerContext:
    platform = Platform("cuda" if arch == "sm90" else "rocm", arch, True)
    current_platform()  # asks torch once what this processor can do
    patch.setattr(linear, "current_platform", lambda: platform)
    patch.setattr(linear, "logits", of_a_gpu)
    pretend(platform, patch)
    return LayerContext(torch.bfloat16, META, OpTable(platform, ops), CONTEXT, group)


def pretend(platform: Platform, patch: pytest.MonkeyPatch) -> None:
    """Triton's kernels are launched as on this device, which decides what is split."""
    for found in pkgutil.iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}."):
        module = importlib.import_module(found.name)
        for name, value in (
            ("current_platform", platform),
            ("compute_units", UNITS[platform.arch]),
        ):
            if hasattr(module, name):
                patch.setattr(module, name, lambda value=value: value)


def without(*names: str) -> dict[str, Any]:
    return {op: tuple(e for e in entries if e.name not in names) for op, entries in OPS.items()}


def assert_at_most(most: int, names: list[str]) -> None:
    listed = "\n".join(f"{i:3} {name}" for i, name in enumerate(names, start=1))
    assert len(names) <= most, f"{len(names)} launches, at most {most}:\n{listed}"
