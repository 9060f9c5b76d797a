"""Shortens the import of torch in programs that need it: `begin`, before anything imports it.

- Its libraries are loaded by a thread, while this one imports other modules. Those in C would wait
  for the thread, since one library is loaded at a time, so what programs need of them comes first.
- Modules of it that nothing here needs wait until they are needed. Most of their time goes into
  registering functions for the meta device, without which some operations on tensors that have no
  values raise `NotImplementedError`: see `with_meta_functions`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

_META_FUNCTIONS = "torch._meta_registrations"
_WAITING = frozenset(
    (
        *(_META_FUNCTIONS, "torch.export", "torch.quantization", "torch.distributions"),
        *("torch.masked", "torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable"),
        *("torch.nn.quantized", "torch.optim", "torch.profiler", "torch.signal.windows"),
        *("torch.utils.data", "torch._native", "torchgen.model", "unittest.mock"),
    )
)
# What is written for a whole torch, and brings it.
_ASKS_FOR_ALL = frozenset(
    (
        *("torch._dynamo", "torch._inductor", "torch._decomp", "torch._refs", "torch._prims"),
        *("torch._functorch.aot_autograd", "transformers.modeling_utils"),
    )
)
_EXTENSIONS = (
    *("_bisect", "_blake2", "_bz2", "_contextvars", "_csv", "_ctypes", "_datetime", "_decimal"),
    *("_hashlib", "_heapq", "_json", "_lzma", "_opcode", "_pickle", "_posixsubprocess", "_queue"),
    *("_random", "_sha512", "_socket", "_struct", "_uuid", "array", "binascii", "fcntl", "grp"),
    *("math", "mmap", "select", "unicodedata", "zlib", "markupsafe._speedups", "msgspec"),
)
_LIBRARY = "libtorch_python.so"
_OF_GPUS = ("libtorch_cuda.so", "libtorch_hip.so")
_TOOLKITS = re.compile(r"^(?:cuda|hip)\b[^=\n]*= *(.*?) *$", re.MULTILINE)


class _WaitingModule(ModuleType):
    """Runs its code when somebody asks for something that it has not."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # what imports and searches look for
            raise AttributeError(name)
        _finder.run(self)
        return getattr(self, name)


class _WaitingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _WaitingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Not yet."""


class _LoadedLoader(Loader):
    """Of a module that its package has imported before.

    An import takes the spec of a module that is there by then, so it has another one meanwhile.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__
        module.__spec__ = ModuleSpec(module.__name__, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    """Finds the modules that wait, and sees who asks for them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _ASKS_FOR_ALL:
            complete()
        package = sys.modules.get(name.rpartition(".")[0])
        # A package comes before what is in it, and mostly brings that.
        if package is not None and self.run(package) and name in sys.modules:
            return ModuleSpec(name, _LoadedLoader(sys.modules[name]))
        if name not in _WAITING:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _WaitingLoader(spec.loader)
        return spec

    def run(self, module: ModuleType) -> bool:
        """Run a module's code, once -> whether it waited."""
        with self._lock:
            if not isinstance(module, _WaitingModule):
                return False
            spec = module.__spec__
            assert spec is not None
            assert isinstance(spec.loader, _WaitingLoader)
            object.__setattr__(module, "__class__", ModuleType)
            spec.loader = module.__loader__ = spec.loader.loader
            spec.loader.exec_module(module)
            return True


_finder = _Finder()


def begin(*, loads: bool = True) -> None:
    """For programs that have their process to themselves; does nothing where torch is there.

    Args:
        loads: the libraries; not where torch is imported in some cases only.
    """
    if "torch" in sys.modules or _finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _finder)
    if not loads or (folder := _folder()) is None:
        return
    libraries = folder / "lib"
    # Those for GPUs are loaded in an order of their own.
    if (libraries / _LIBRARY).exists() and not any((libraries / of).exists() for of in _OF_GPUS):
        _import_extensions()
        load = ctypes.CDLL(None).dlopen  # which, unlike an import, lets other threads run
        arguments = os.fsencode(libraries / _LIBRARY), os.RTLD_LAZY
        # No daemon: a program that ends in the middle of it would crash.
        threading.Thread(target=load, args=arguments).start()


def _import_extensions() -> None:
    for name in _EXTENSIONS:
        with contextlib.suppress(ImportError):  # which may be part of the interpreter
            importlib.import_module(name)
    import tokenizers

    # Memory of its threads is found under the same lock, once for each.
    tokenizers.Tokenizer(tokenizers.models.BPE())


def is_for_gpus() -> bool:
    """Whether this torch may use GPUs, as the file of its version says; it is not imported."""
    folder = _folder()
    try:
        text = "" if folder is None else (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    return set(_TOOLKITS.findall(text)) != {"None"}


def _folder() -> Path | None:
    """That of torch; None where there is none."""
    found = importlib.util.find_spec("torch")
    return None if found is None or found.origin is None else Path(found.origin).parent


def complete() -> bool:
    """Run the functions for the meta device -> whether they waited."""
    module = sys.modules.get(_META_FUNCTIONS)
    return module is not None and _finder.run(module)


def with_meta_functions(call: Callable[[], T]) -> T:
    """What `call` returns, which has no effect when it raises; it is called again if it lacked
    functions for the meta device that waited.
    """
    try:
        return call()
    except NotImplementedError:
        if not complete():
            raise
        return call()
