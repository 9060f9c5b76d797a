"""What the fake aiter's sums over ranks check and compute: ranks are threads that read each other's
buffers, at addresses in this process.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from fake_aiter import Check

FLAGS, HANDLE = 5504, 64
_buffers: dict[int, torch.Tensor] = {}
_barriers: dict[tuple[int, ...], threading.Barrier] = {}
_channels: dict[int, Channel] = {}
_lock = threading.Lock()


@dataclass
class Channel:
    """What `init_custom_ar` made: addresses of all ranks' buffers."""

    rank: int
    metas: tuple[int, ...]
    staging: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def wait(self) -> None:
        with _lock:
            barrier = _barriers.setdefault(self.metas, threading.Barrier(len(self.metas)))
        barrier.wait(60)


def meta_size(_: Check) -> int:
    return FLAGS


def allocate_meta_buffer(check: Check) -> int:
    buffer = torch.zeros(check.value("size"), dtype=torch.uint8)
    _buffers[buffer.data_ptr()] = buffer
    return buffer.data_ptr()


def allocate_data_buffer(check: Check) -> int:
    return allocate_meta_buffer(check)


def get_meta_buffer_ipc_handle(check: Check) -> None:
    address = check.value("inp_ptr")
    check.that(address in _buffers, "a buffer of its own")
    handle = address.to_bytes(8, "little") * (HANDLE // 8)
    ctypes.memmove(check.value("out_handle_ptr"), handle, HANDLE)


def _open(check: Check) -> tuple[int, ...]:
    """The addresses that handles stand for."""
    handles, offsets = check.value("ipc_handle_ptrs"), check.value("offsets")
    check.that(len(handles) == len(offsets) and not any(offsets), "a handle of every rank")
    opened = []
    for pointer in handles:
        handle = ctypes.string_at(pointer, HANDLE)
        check.that(handle == handle[:8] * (HANDLE // 8), "a handle")
        opened.append(int.from_bytes(handle[:8], "little"))
    check.that(len(set(opened)) == len(opened), "different buffers")
    return tuple(opened)


def init_custom_ar(check: Check) -> int:
    opened, rank = _open(check), check.value("rank")
    check.that(opened[rank] == check.value("meta_ptr"), "its own buffer at its own place")
    check.that(len(opened) in (2, 4, 6, 8), "an even number of ranks up to 8")
    check.that(check.value("rank_data_ptr") > 0, "room for pointers")
    check.that(check.value("rank_data_sz") >= 64 * len(opened), "room for pointers")
    check.that(check.value("fully_connected") is True, "GPUs that all see each other")
    with _lock:
        _channels[len(_channels) + 1] = Channel(rank, opened)
        return len(_channels)


def register_input_buffer(check: Check) -> None:
    channel, opened = _channels[check.value("_fa")], _open(check)
    address = check.value("self_ptr")
    check.that(opened[channel.rank] == address, "its own buffer at its own place")
    channel.staging[address] = opened


def _sum(check: Check, pointer: str, size: str) -> torch.Tensor:
    """Of all ranks' inputs, in float32."""
    x = check.activation("inp", "M N")
    channel = _channels[check.value("_fa")]
    address, room = check.value(pointer), check.value(size)
    if address:
        check.that(room == _buffers[address].numel() and x.nbytes <= room, "its whole size")
    else:
        address, room = x.data_ptr(), room or x.nbytes
    check.that(address in channel.staging, "a registered buffer, or an input in one")
    check.that(_buffers[channel.metas[channel.rank]].numel() >= FLAGS + 2 * room, "room behind")
    check.that(x.nbytes % 16 == 0, "vectors of 16 bytes")
    if check.value(pointer):
        _buffers[address][: x.nbytes] = x.flatten().view(torch.uint8)
        with _lock:
            check.library.copies += 1
    channel.wait()
    total = torch.zeros(x.shape)
    for peer in channel.staging[address]:
        total += _buffers[peer][: x.nbytes].view(x.dtype).view(x.shape).float()
    channel.wait()
    return total


def all_reduce(check: Check) -> None:
    check.that(check.value("reg_inp_ptr") != 0, "a copy, or an output that other ranks know")
    total = _sum(check, "reg_inp_ptr", "reg_inp_bytes")
    check.that(check.value("use_new") is True, "the newer kernels")
    check.that(check.value("open_fp8_quant") is False, "no rounding to 8 bits")
    check.activation("out", "M N").copy_(total)


def fused_allreduce_rmsnorm(check: Check) -> None:
    total = _sum(check, "reg_ptr", "reg_bytes")
    residual, weight = check.activation("res_inp", "M N"), check.activation("w", "N")
    x, size = check.value("inp"), check.sizes["N"]
    check.that(x.dtype == residual.dtype == weight.dtype, "one type")
    check.that(size % 8 == 0 and 512 <= size <= 16384, "rows that the kernels are made for")
    ranks = len(_channels[check.value("_fa")].metas)
    check.that(ranks != 6, "2, 4 or 8 ranks")
    is_short = x.nbytes <= 128 * 7168 * 2 // ranks
    check.that(check.value("use_1stage") is is_short, "one stage for short inputs")
    summed = check.activation("res_out", "M N")
    summed.copy_(total + residual.float())
    normed = F.rms_norm(summed.float(), weight.shape, weight.float(), check.value("eps"))
    check.activation("out", "M N").copy_(normed)


KERNELS: dict[str, Callable[[Any], Any]] = {
    kernel.__name__: kernel
    for kernel in (
        meta_size,
        allocate_meta_buffer,
        allocate_data_buffer,
        get_meta_buffer_ipc_handle,
        init_custom_ar,
        register_input_buffer,
        all_reduce,
        fused_allreduce_rmsnorm,
    )
}
