"""Watches work on tensors and lists the kernels that it calls."""

from __future__ import annotations

import inspect
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atom.model_ops.kernels.native import movement
from atom.model_ops.kernels.native.gather import gather_rows

_OPS_OF_TORCH = "atom.model_ops.kernels.torch."
_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
_VIEWS = frozenset(
    {
        _aten.alias.default,
        _aten.as_strided.default,
        _aten.detach.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.squeeze.dim,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unbind.int,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten.view.dtype,
        _aten._unsafe_view.default,
    }
)


class NotRecordableError(RuntimeError):
    """Work calls what no program can hold; the message names it."""


class Place(NamedTuple):
    """Attributes:
    storage: address of the memory that holds a pointer's target.
    num_bytes: its size.
    """

    storage: int
    num_bytes: int


@dataclass(frozen=True)
class Call:
    """Attributes:
    kernel: its name in the library.
    block: its arguments.
    places: for each pointer, the memory allocated while recording that it points into; None for a
        null pointer or what was there before.
    """

    kernel: str
    block: bytes
    places: tuple[Place | None, ...]


@dataclass(frozen=True)
class Pause:
    """What the host does between two calls.

    Attributes:
        at: the number of calls before it.
        action: does it, in each replay.
        tensors: that it reads and writes.
    """

    at: int
    action: Callable[[], None]
    tensors: tuple[torch.Tensor, ...]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch allocate and make views, turns copies into kernels and refuses everything else.

    Attributes:
        calls: of kernels, in order.
        pauses: between them, in order.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch should import its compiler, for seconds, to keep it away from this mode."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.pauses: list[Pause] = []
        # All memory allocated while recording stays, so that no two tensors have one address.
        self._storages: list[torch.UntypedStorage] = []
        self._starts: list[int] = []
        self._places: dict[int, Place] = {}

    @property
    def allocated(self) -> list[Place]:
        """All memory, in the order in which it was asked for."""
        return [self._places[storage.data_ptr()] for storage in self._storages]

    def called(self, kernel: str, block: bytes, num_pointers: int) -> None:
        pointers = memoryview(block).cast("Q")[:num_pointers].tolist()
        self.calls.append(Call(kernel, block, tuple(map(self._place_of, pointers))))

    def paused(self, action: Callable[[], None], tensors: tuple[torch.Tensor, ...]) -> None:
        self.pauses.append(Pause(len(self.calls), action, tensors))

    def _place_of(self, pointer: int) -> Place | None:
        i = bisect_right(self._starts, pointer) - 1
        if i < 0:
            return None
        place = self._places[self._starts[i]]
        return place if pointer < place.storage + place.num_bytes else None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATIONS:
            return self._own(lambda: func(*args, **kwargs))
        if func in _MOVEMENTS:
            return _MOVEMENTS[func](self, *args, **kwargs)
        if func in _VIEWS:
            return func(*args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            op = _op_that_runs()
            called = f"{func} in {op}" if op else str(func)
            raise NotRecordableError(f"{called} is no kernel that a program could hold")
        return result

    def _own(self, allocate: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            tensor = allocate()
        except RuntimeError as error:
            raise NotRecordableError(f"not all tensors are had at once: {error}") from error
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._storages.append(storage)
            place = Place(storage.data_ptr(), storage.nbytes())
            self._places[place.storage] = place
            insort(self._starts, place.storage)
        return tensor

    def new(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A new tensor on the CPU, contiguous by default."""
        if strides is None:
            return self._own(lambda: torch.empty(tuple(shape), dtype=dtype))
        return self._own(lambda: torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype))


def _op_that_runs() -> str | None:
    """The op whose implementation is being called, by the name of its function; None outside of
    all.
    """
    frame, name = inspect.currentframe(), None
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_OPS_OF_TORCH):
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


def _copy_(_: Recorder, to: torch.Tensor, source: torch.Tensor, *__: Any) -> Any:
    if not movement.can_copy(to, source):
        raise NotRecordableError(
            f"a copy of {source.dtype} {list(source.shape)} to {to.dtype} {list(to.shape)} is no "
            f"kernel that a program could hold"
        )
    return movement.copy(to, source)


def _clone(recorder: Recorder, source: torch.Tensor, **_: Any) -> Any:
    return _copy_(recorder, recorder.new(source.shape, source.dtype), source)


def _to_copy(
    recorder: Recorder, source: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any
) -> Any:
    return _copy_(recorder, recorder.new(source.shape, dtype or source.dtype), source)


def _cat(recorder: Recorder, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    out = recorder.new(shape, tensors[0].dtype)
    start = 0
    for tensor in tensors:
        size = tensor.shape[dim]
        _copy_(recorder, out.narrow(dim, start, size), tensor)
        start += size
    return out


def _gather(recorder: Recorder, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if index.dtype is not torch.int64 or index.dim() != 1 or not source[:1].is_contiguous():
        raise NotRecordableError(
            f"rows {list(source.shape)} by {index.dtype} {list(index.shape)} are no kernel that a "
            f"program could hold"
        )
    if not index.is_contiguous():
        index = _clone(recorder, index)
    with recorder:
        return gather_rows(source, index)


def _index(recorder: Recorder, source: torch.Tensor, indices: Sequence[Any]) -> Any:
    if len(indices) != 1 or indices[0] is None:
        raise NotRecordableError("an index in several dimensions is no kernel for a program")
    return _gather(recorder, source, indices[0])


def _index_select(recorder: Recorder, source: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
    if dim != 0:
        raise NotRecordableError(f"a selection along dimension {dim} is no kernel for a program")
    return _gather(recorder, source, index)


def _embedding(
    recorder: Recorder, weight: torch.Tensor, index: torch.Tensor, *_: Any, **__: Any
) -> Any:
    return _gather(recorder, weight, index)


_MOVEMENTS: Mapping[Any, Callable[..., Any]] = {
    _aten.copy_.default: _copy_,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.cat.default: _cat,
    _aten.index.Tensor: _index,
    _aten.index_select.default: _index_select,
    _aten.embedding.default: _embedding,
}
