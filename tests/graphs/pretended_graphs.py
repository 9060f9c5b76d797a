"""CUDA graphs, pretended on a CPU: they keep the addresses of what work reads and writes, and no
tensors.

A capture notes the operations that work runs, and where their tensors lie. A replay runs them again
there, and refuses to if memory that was there before the capture has been freed or moved since. So
`CudaGraphBackend` itself can be tested. Whatever graphs do with a GPU's kernels is not pretended.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.native import bindings
from atom.model_ops.kernels.native.build import NativeBuild
from atom.model_ops.kernels.torch import attention, mla, moe, sampling


class GraphError(AssertionError):
    """A device would not capture this, or would read other numbers in a replay."""


@dataclass(frozen=True, eq=False)
class _Memory:
    """The memory of tensors, which may be freed.

    Attributes:
        made_by: the number of the call that allocated it; None if it was there before the capture.
        first: the first operation that met it.
    """

    storage: StorageWeakRef
    address: int
    made_by: int | None
    first: str

    def find(self) -> torch.UntypedStorage:
        """The storage, as it was.

        Raises:
            GraphError: when a device's graph would read or write what is no longer there.
        """
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise GraphError(f"a replay needs memory that was freed: {self.first}")
        if storage.data_ptr() != self.address:
            raise GraphError(f"a replay needs memory that has moved: {self.first}")
        return storage


# What a replay has found, and allocated so far.
_Storages = dict[_Memory, torch.UntypedStorage]


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies."""

    memory: _Memory
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self, storages: _Storages) -> torch.Tensor:
        storage = storages[self.memory] if self.memory in storages else self.memory.find()
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Call:
    """An operation.

    Attributes:
        arguments: positional ones and those by name, with places instead of tensors.
        results: for each tensor of its result, its memory if the call allocated it.
    """

    function: Callable[..., Any]
    arguments: Any
    results: list[_Memory | None]

    def run(self, storages: _Storages) -> None:
        def tensor(leaf: Any) -> Any:
            return leaf.tensor(storages) if isinstance(leaf, _Place) else leaf

        args, kwargs = _changed(self.arguments, tensor)
        result = self.function(*args, **kwargs)
        if not any(self.results):
            return
        for memory, tensor in zip(self.results, _tensors(result), strict=True):
            if memory is not None:
                storages[memory] = tensor.untyped_storage()


class _Recording(TorchDispatchMode):
    """Notes what runs.

    Attributes:
        active: the recording that is under way.
        calls: all operations that are no views.
    """

    active: ClassVar[_Recording | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        # By address of the storage, which is not handed out again while there is a reference.
        self._known: dict[int, _Memory] = {}
        self._number = 0
        self._is_within_call = False

    @property
    def memory(self) -> list[_Memory]:
        """What was met, in order."""
        return list(self._known.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_within_call:
            if func is torch.ops.aten.lift_fresh.default:
                self._note_results(str(func), args)  # a number, made just now
            self._places(str(func), (args, kwargs or {}))
            result = func(*args, **(kwargs or {}))
            self._note_results(str(func), result)
            return result
        result = self.record(func, str(func), args, kwargs or {})
        if any(isinstance(leaf, bool | int | float) for leaf in leaves_of(result)):
            raise GraphError(f"{func} asks the device for a number")
        return result

    def record(self, function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Run a call and note it."""
        arguments = self._places(name, (args, kwargs))
        self._number += 1
        result = function(*args, **kwargs)
        results = self._note_results(name, result)
        schema = getattr(function, "_schema", None)
        if schema is None or schema.is_mutable or any(results):
            self.calls.append(_Call(function, arguments, results))
        return result

    def record_as_one(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The same of a function, whatever operations it runs; their tensors are noted, too."""
        self._is_within_call = True
        try:
            return self.record(function, function.__name__, args, {})
        finally:
            self._is_within_call = False

    def _places(self, name: str, arguments: Any) -> Any:
        def place(leaf: Any) -> Any:
            return self._place(name, leaf) if isinstance(leaf, torch.Tensor) else leaf

        return _changed(arguments, place)

    def _place(self, name: str, tensor: torch.Tensor) -> _Place:
        where = tensor.storage_offset(), tensor.size(), tensor.stride()
        return _Place(self._memory(name, tensor, None), tensor.dtype, *where)

    def _note_results(self, name: str, result: Any) -> list[_Memory | None]:
        memory = [self._memory(name, tensor, self._number) for tensor in _tensors(result)]
        return [own if own.made_by == self._number else None for own in memory]

    def _memory(self, name: str, tensor: torch.Tensor, made_by: int | None) -> _Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            first = f"{name} with {tuple(tensor.shape)} of {tensor.dtype}"
            reference = StorageWeakRef(storage)
            memory = _Memory(reference, storage.data_ptr(), made_by, first)
            self._known[storage._cdata] = memory
        return self._known[storage._cdata]


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Tuples, lists and tables with their leaves changed; torch's own function takes far longer."""
    if isinstance(value, tuple):
        return tuple([_changed(each, change) for each in value])
    if isinstance(value, list):
        return [_changed(each, change) for each in value]
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    return change(value)


def leaves_of(value: Any) -> list[Any]:
    """What tuples, lists and tables hold in the end."""
    leaves: list[Any] = []
    _changed(value, leaves.append)
    return leaves


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


class PretendedGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._needed: list[_Memory] = []

    def end_capture(self, recording: _Recording) -> None:
        """Keep what was recorded.

        Raises:
            GraphError: when memory of the graph's pool is still in use, where another graph's
                replay may write.
        """
        self._calls = recording.calls
        self._needed = [memory for memory in recording.memory if memory.made_by is None]
        made = [memory for memory in recording.memory if memory.made_by is not None]
        if not all(memory.storage.expired() for memory in made):
            gc.collect()
        for memory in made:
            if not memory.storage.expired():
                raise GraphError(f"a result stays in the graph's pool: {memory.first}")

    @torch.inference_mode()
    def replay(self) -> None:
        storages = {memory: memory.find() for memory in self._needed}
        for call in self._calls:
            call.run(storages)


@contextmanager
def _capturing(graph: PretendedGraph, **_: object) -> Iterator[None]:
    """`torch.cuda.graph`."""
    recording = _Recording()
    _Recording.active = recording
    try:
        with recording:
            yield
    finally:
        _Recording.active = None
    graph.end_capture(recording)


def pretend_graphs(patch: pytest.MonkeyPatch) -> None:
    """Let `torch.cuda` capture pretended graphs."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, value in {
        "graph_pool_handle": lambda: None,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": nullcontext,
        "graph": _capturing,
        "CUDAGraph": PretendedGraph,
    }.items():
        patch.setattr(torch.cuda, name, value)


def pretend_kernels(patch: pytest.MonkeyPatch) -> None:
    """Run ops in plain torch, whose operations can be noted.

    Those that ask for numbers on a CPU, as no kernel of a device does, are noted as one call each.
    """
    patch.setattr(bindings, "native_build", lambda: NativeBuild(None, "graphs are pretended"))
    patch.setattr(sampling, "choose_tokens", _choosing(sampling.choose_tokens))
    patch.setattr(moe, "sum_experts", _as_one(moe.sum_experts))
    for module in (attention, mla):
        patch.setattr(module, "write_rows", _as_one(module.write_rows))


def _as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        recording = _Recording.active
        return function(*args) if recording is None else recording.record_as_one(function, args)

    return run


def _choosing(choose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def choose_tokens(scores: torch.Tensor, options: tuple[Any, ...]) -> torch.Tensor:
        return choose(scores, SamplingMetadata(*options))

    run = _as_one(choose_tokens)
    return lambda scores, metadata: run(scores, metadata.tensors)
