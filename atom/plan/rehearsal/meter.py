"""Counts what work on tensors without data would allocate and launch."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, ValuesView
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations of torch that launch nothing.
_FREE = ("detach", "_unsafe_view", "resize_", "lift_fresh")


@dataclass
class Launches:
    """Attributes:
    by_library: numbers of launches: of `torch`, `triton`, other libraries, and `collectives`.
    kernels: the kernels of Triton that were compiled for them.
    """

    by_library: Counter[str] = field(default_factory=Counter)
    kernels: set[str] = field(default_factory=set)

    @property
    def total(self) -> int:
        return self.by_library.total()


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs torch's operations on the meta device, and counts them.

    What asks for numbers on the host gets zeros.

    Attributes:
        launches: so far; to be replaced to count from zero.
        live, peak: bytes of tensors on the meta device that were made within, now and at most.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = Launches()
        self.live = self.peak = 0
        # Operations that are not made of others.
        self._simple: set[Any] = set()
        # Of a result, by the operation and the forms of its arguments.
        self._forms: dict[object, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def peak_of(self, work: Callable[[], object]) -> int:
        """As `kv_cache.memory.peak_bytes`."""
        gc.collect()  # what earlier work left in cycles is not this one's
        self.peak = self.live
        work()
        return self.peak - self.live

    def held(self) -> set[int]:
        """Of the memory that lives, the storages' addresses."""
        return set(self._known)

    def launched(self, library: str, count: int = 1) -> None:
        self.launches.by_library[library] += count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(tensor.is_meta for tensor in _tensors((args, kwargs.values()))):
            return self._allocated(func(*args, **kwargs))
        if func not in self._simple:
            with self:  # such as `to` and `contiguous`, which may copy or not
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
            self._simple.add(func)
        name = func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or name in _FREE):
            self.launched("torch", _kernels_of(name, args))
        if _goes_to_host(name, args, kwargs):
            return _on_host(name, args, kwargs)
        if func is torch.ops.aten.mm.dtype:  # which has no shape function
            x, weight, dtype = args
            return self._allocated(x.new_empty(x.shape[0], weight.shape[1], dtype=dtype))
        if func._schema.is_mutable or func.is_view or name in _FREE:
            return self._allocated(func(*args, **kwargs))
        return self._allocated(self._made(func, args, kwargs))

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor, whose form torch finds once for each form of arguments."""
        key = func, _form(args), _form(tuple(kwargs.items()))
        if (form := self._forms.get(key)) is not None:
            shape, stride, dtype = form
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.is_meta:
            self._forms[key] = out.shape, out.stride(), out.dtype
        return out

    def _allocated(self, out: Any) -> Any:
        """The result of an operation, whose memory counts."""
        for tensor in _tensors((out,)):
            if tensor.is_meta:
                self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def free(_: object) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, free)
        self.live += size
        self.peak = max(self.peak, self.live)


def _form(value: Any) -> object:
    """What the form of a result depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, (tuple, list)):
        return tuple(_form(each) for each in value)
    return type(value), repr(value)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list, ValuesView)):
            yield from _tensors(value)


def _kernels_of(name: str, args: Any) -> int:
    """How many an operation launches: one, and of copies of several tensors one for each type."""
    if name != "_foreach_copy_":
        return 1
    return len({(to.dtype, of.dtype) for to, of in zip(*args[:2], strict=True)})


def _goes_to_host(name: str, args: Any, kwargs: Any) -> bool:
    if name == "_to_copy":
        return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    return name == "copy_" and not args[0].is_meta


def _on_host(name: str, args: Any, kwargs: Any) -> torch.Tensor:
    if name == "copy_":
        host: torch.Tensor = args[0]
        return host
    return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
