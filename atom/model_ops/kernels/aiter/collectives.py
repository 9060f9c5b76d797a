"""Sums over the ranks of one machine with aiter, whose kernels read the other ranks' memory.

Each rank has a staging buffer that the others have opened. A call copies its input there, so that
tensors may lie anywhere and calls may be captured in graphs; then all ranks read all buffers. What
was written to the buffer in the first place (`staging`) is not copied.
Assumes that what precedes a call on the stream is complete before another rank reads it, and that a
buffer is overwritten only when all have read it: the kernels wait for each other at both ends. They
do so since the releases below; ranks of older ones may read what belongs to the next sum, without
any error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial as bound
from weakref import WeakKeyDictionary

import torch

from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.kernels import probe
from atom.model_ops.kernels.aiter.support import requires
from atom.model_ops.kernels.probe import EntryPoint, function
from atom.model_ops.kernels.torch import collectives
from atom.model_ops.registry import OpQuery

_MODULE = "aiter.ops.custom_all_reduce"
_META_SIZE = EntryPoint(f"{_MODULE}:meta_size", "")
_ALLOCATE_META = EntryPoint(f"{_MODULE}:allocate_meta_buffer", "size")
_ALLOCATE_DATA = EntryPoint(f"{_MODULE}:allocate_data_buffer", "size")
_GET_HANDLE = EntryPoint(f"{_MODULE}:get_meta_buffer_ipc_handle", "inp_ptr out_handle_ptr")
_INIT = EntryPoint(
    f"{_MODULE}:init_custom_ar",
    "meta_ptr rank_data_ptr rank_data_sz ipc_handle_ptrs offsets rank fully_connected",
)
_REGISTER = EntryPoint(f"{_MODULE}:register_input_buffer", "_fa self_ptr ipc_handle_ptrs offsets")
_ALL_REDUCE = EntryPoint(
    f"{_MODULE}:all_reduce",
    "_fa inp out use_new open_fp8_quant reg_inp_ptr reg_inp_bytes",
)
_FUSED = EntryPoint(
    f"{_MODULE}:fused_allreduce_rmsnorm",
    "_fa inp res_inp res_out out w eps reg_ptr reg_bytes use_1stage",
)
_SETUP = (_META_SIZE, _ALLOCATE_META, _ALLOCATE_DATA, _GET_HANDLE, _INIT, _REGISTER)

# Since when the kernels wait for each other before they end (#3514, #4346).
_SINCE = "0.1.16"
_FUSED_SINCE = "0.1.19.post1"
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.?post(\d+))?(?P<early>\.?(?:dev|rc|a|b)\d*)?")

# Beyond that bandwidth counts, not latency, and the group's own collectives run.
_STAGED_BYTES = 32 * 2**20
# Two intermediate results of a sum in two stages lie behind the flags.
_INTERMEDIATE = 2
# Pointers to the buffers of all ranks; a few hundred bytes of it are used.
_POINTER_BYTES = 2**16
_HANDLE_BYTES = 64  # hipIpcMemHandle_t
# Up to this many bytes, over the number of ranks, one stage is the faster one.
_ONE_STAGE = 128 * 7168 * 2
# Numbers that a thread loads at once.
_PACK = 8


def _refuses(ranks: tuple[int, ...], sizes: range, since: str, query: OpQuery) -> str | None:
    shape = query.shape
    if not _is_since(version := probe.version(), since):
        return (
            f"before {since} its kernels end while other ranks still read their input, which "
            f"makes wrong sums; this aiter is {version or 'of an unknown version'}"
        )
    if not shape["peer_access"]:
        return "reads other ranks' memory: all must be on one machine, and any order of sums do"
    if shape["num_ranks"] not in ranks:
        return f"sums over {', '.join(map(str, ranks))} ranks, not {shape['num_ranks']}"
    if shape["size"] not in sizes:
        return (
            f"takes rows of {sizes.start} to {sizes[-1]} numbers, a multiple of {sizes.step}, not "
            f"{shape['size']}"
        )
    return None


def _is_since(version: str | None, since: str) -> bool:
    known, wanted = _release(version or ""), _release(since)
    return known is not None and wanted is not None and known >= wanted


def _release(version: str) -> tuple[int, ...] | None:
    """The release that a version has all of; None when it cannot be told.

    A development version is named after the release that follows it.
    """
    if (found := _VERSION.match(version)) is None:
        return None
    numbers = [int(number or 0) for number in found.groups()[:4]]
    if found["early"]:
        numbers[3 if found[4] else 2] -= 1
    return tuple(numbers)


refuses_all_reduce = requires(
    _ALL_REDUCE, *_SETUP, also=bound(_refuses, (2, 4, 6, 8), range(_PACK, 2**20, _PACK), _SINCE)
)
refuses_add_norm = requires(
    _FUSED,
    *_SETUP,
    also=bound(_refuses, (2, 4, 8), range(64 * _PACK, 2048 * _PACK + 1, _PACK), _FUSED_SINCE),
)


def all_reduce(partial: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """The sum of all ranks' `partial`, [T, size].

    It is always copied: without a copy this call wants other ranks to know the output, too.
    """
    if not 0 < partial.nbytes <= _STAGED_BYTES:
        return collectives.all_reduce(partial, group)
    channel = _channel(group, partial.device)
    out = torch.empty_like(partial)
    function(_ALL_REDUCE)(channel.handle, partial, out, True, False, channel.staging, _STAGED_BYTES)
    return out


def all_reduce_add_rms_norm(
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: ParallelGroup,
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(norm(x + residual), x + residual)`, where x [T, size] is the sum of the `partial`s."""
    if not 0 < partial.nbytes <= _STAGED_BYTES:
        return collectives.all_reduce_add_rms_norm(
            partial, residual, weight, eps, group, add_rms_norm
        )
    channel = _channel(group, partial.device)
    is_staged = partial.data_ptr() == channel.staging
    normed, total = torch.empty_like(partial), torch.empty_like(partial)
    function(_FUSED)(
        channel.handle,
        partial,
        residual.contiguous(),
        total,
        normed,
        weight,
        eps,
        0 if is_staged else channel.staging,
        0 if is_staged else _STAGED_BYTES,
        partial.nbytes <= _ONE_STAGE // group.size,
    )
    return normed, total


def staging(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, group: ParallelGroup
) -> torch.Tensor | None:
    """Memory [T, size] that the next `all_reduce_add_rms_norm` reads without a copy.

    It is the same for every call. None for rows that this sum does not take.
    """
    nbytes = shape[0] * shape[1] * dtype.itemsize
    if not 0 < nbytes <= _STAGED_BYTES:
        return None
    return _channel(group, device).memory[:nbytes].view(dtype).view(shape)


class _Channel:
    """This rank's buffers, opened by the others, and theirs; they live as long as the process.

    All ranks create theirs together, at their first sum. No graph is captured then: work runs once
    before its capture.

    Attributes:
        handle: aiter's, of this rank's part.
        staging: address of the staging buffer.
        memory: its bytes.
    """

    def __init__(self, group: ParallelGroup, device: torch.device) -> None:
        meta_bytes = function(_META_SIZE)() + _INTERMEDIATE * _STAGED_BYTES
        meta = function(_ALLOCATE_META)(meta_bytes)
        self.staging: int = function(_ALLOCATE_DATA)(_STAGED_BYTES)
        self.memory = _memory(self.staging, _STAGED_BYTES, device)
        self._pointers = torch.empty(_POINTER_BYTES, dtype=torch.uint8, device=device)
        offsets = [0] * group.size  # buffers are allocations of their own
        handles = _exchange_handles(meta, group, device)
        self.handle: int = function(_INIT)(
            meta,
            self._pointers.data_ptr(),
            _POINTER_BYTES,
            [row.data_ptr() for row in handles],
            offsets,
            group.rank,
            True,
        )
        handles = _exchange_handles(self.staging, group, device)
        function(_REGISTER)(self.handle, self.staging, [row.data_ptr() for row in handles], offsets)


_channels: WeakKeyDictionary[object, _Channel] = WeakKeyDictionary()


def _channel(group: ParallelGroup, device: torch.device) -> _Channel:
    if group.collectives not in _channels:
        _channels[group.collectives] = _Channel(group, device)
    return _channels[group.collectives]


def _memory(address: int, size: int, device: torch.device) -> torch.Tensor:
    """uint8 [size] at an address of the device, which stays aiter's."""
    if device.type == "meta":  # a rehearsal, which has no addresses
        return torch.empty(size, dtype=torch.uint8, device=device)
    out = torch.empty(0, dtype=torch.uint8, device=device)
    storage = torch._C._construct_storage_from_data_pointer(address, out.device, size)
    return out.set_(storage)


def _exchange_handles(
    address: int, group: ParallelGroup, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Of every rank the handle [64] by which other processes open its buffer, on the host."""
    own = torch.empty(_HANDLE_BYTES, dtype=torch.uint8)
    function(_GET_HANDLE)(address, own.data_ptr())
    every = group.all_gather(own.to(device))
    return every.view(group.size, _HANDLE_BYTES).cpu().unbind()
