"""A stand-in for aiter that checks how it is called, records it, and computes in plain torch.

Names, parameters, their order and defaults come from `aiter_signatures.json`; shapes, types and
limits from the checks below, which know nothing of the adapters. Any deviation raises.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fake_aiter_kernels
import fake_aiter_latents
import torch
from fake_aiter_quant import ActivationType, QuantType

from atom.model_ops.kernels import aiter
from atom.model_ops.kernels.probe import EntryPoint, Library
from atom.model_ops.op_table.ops import OPS

_FILE = Path(__file__).with_name("aiter_signatures.json")
SIGNATURES: Mapping[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))["functions"]
# The part of the op table that is aiter's.
AITER = {op: tuple(e for e in entries if e.name == "aiter") for op, entries in OPS.items()}
# What the adapters call, by name.
ENTRY_POINTS: Mapping[str, EntryPoint] = {
    value.name: value
    for module in pkgutil.iter_modules(aiter.__path__, f"{aiter.__name__}.")
    for value in vars(importlib.import_module(module.name)).values()
    if isinstance(value, EntryPoint)
}
# What is no function.
ENUMERATIONS = {"QuantType": QuantType, "ActivationType": ActivationType}
REDUCE = "CXX_PS_REDUCE_AVAILABLE"
# What an adapter asks about the device and about tables, which computes nothing.
QUESTIONS = {
    *("get_gfx", "get_cu_num", "get_GEMM_A16W16_config"),
    *("get_2stage_cfgs", "stage2_uses_route_reduce", "is_flydsl_available"),
}
# What the package demands of others: `install_requires` in aiter's setup.py at this commit.
REQUIREMENTS_COMMIT = "e4048607a535ace3a2b51ded31b1c8c2d45c0879"
REQUIREMENTS = (
    *("pybind11>=3.0.1", "ninja", "pandas", "einops", "psutil", "packaging"),
    "flydsl==0.3.1",
)
PACKAGES: Mapping[str, str] = {"flydsl": "0.3.1"}
PROGRAMS = ("hipcc", "hipconfig", "make")
# Defaults that are objects of aiter's: the fake has their names in their place.
_PLAIN_DEFAULTS = {"torch.bfloat16": torch.bfloat16}


class DeviationError(AssertionError):
    """aiter was called as its signatures or its limits do not allow."""


@dataclass(frozen=True)
class Call:
    """One call with all its arguments, defaults included."""

    name: str
    arguments: Mapping[str, Any]


class FakeAiter:
    """Attributes:
    calls: what was called, in order.
    copies: inputs of sums over ranks that it has copied to where other ranks read them.
    arch: the device's architecture.
    told_arch: the one that it picks kernels for.
    packages: versions of what is installed beside it, by name.
    has_compiled_reduce: whether the last step of its Gluon decode could be imported.
    tuned_experts: what its table names for (tokens, hidden size, intermediate size, experts,
        choices): the kernels of both products.
    seen_experts: what it ran for each call of `fused_moe`; None where its table has nothing.
    tuned: products (rows, outputs, inputs) that its table has measured kernels for.
    split_table: `get_meta_param`, whose cache drops the table of another call after 128 further
        ones.
    """

    def __init__(
        self,
        *extra_dtypes: torch.dtype,
        missing: Sequence[str] = (),
        arch: str = "gfx942",
        version: str | None = "0.1.20",
        gpu_archs: str | None = None,
        packages: Mapping[str, str] = PACKAGES,
        programs: Sequence[str] = PROGRAMS,
        has_compiled_reduce: bool = True,
    ) -> None:
        """Args:
        extra_dtypes: types of activations that it takes beside bfloat16 and float16.
        missing: entry points that this aiter does not have.
        version: None for an aiter that does not tell.
        gpu_archs: `$GPU_ARCHS`, of which it takes the last.
        programs: on PATH.
        """
        self.calls: list[Call] = []
        self.arch = arch
        self.copies = 0
        self.told_arch = arch if gpu_archs is None else gpu_archs.split(";")[-1]
        self.packages = packages
        self.programs = programs
        self.has_compiled_reduce = has_compiled_reduce
        self.tuned_experts: dict[tuple[int, int, int, int, int], tuple[str, str]] = {}
        self.seen_experts: list[tuple[str, str] | None] = []
        self.tuned: set[tuple[int, int, int]] = set()
        self.split_table = functools.lru_cache(fake_aiter_latents.split_table)
        self._extra_dtypes = frozenset(extra_dtypes)
        self._modules: dict[str, dict[str, Any]] = {"aiter": {}}
        if version is not None:
            self._modules["aiter._version"] = {"__version__": version}
        for name, entry in SIGNATURES.items():
            module = self._modules.setdefault(entry["module"], {})
            if name in missing:
                continue
            if name == REDUCE:
                module[name] = has_compiled_reduce
            else:
                module[name] = ENUMERATIONS.get(name) or self._function(name)

    @property
    def library(self) -> Library:
        return Library(
            self._load,
            self._extra_dtypes,
            self.packages.get,
            lambda: REQUIREMENTS,
            self.programs.__contains__,
        )

    @property
    def names(self) -> set[str]:
        """Entry points called so far, without questions."""
        return {call.name for call in self.calls} - QUESTIONS

    def _load(self, module: str) -> Mapping[str, Any]:
        if module not in self._modules:
            raise ModuleNotFoundError(f"No module named {module!r}")
        return self._modules[module]

    def _function(self, name: str) -> Callable[..., Any]:
        called = partial(self._call, name)
        called.__signature__ = signature(name)  # type: ignore[attr-defined]
        return called

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature(name).bind(*args, **kwargs)
        except TypeError as error:
            raise DeviationError(f"{name}: {error}") from error
        bound.apply_defaults()
        self.calls.append(Call(name, dict(bound.arguments)))
        compute = fake_aiter_kernels.KERNELS.get(name)
        if compute is None:
            raise DeviationError(f"{name} must not be called")
        activations = {torch.bfloat16, torch.float16} | self._extra_dtypes
        check = Check(name, bound.arguments, activations, self)
        out = compute(check)
        check.finish()
        return out


@functools.cache
def signature(name: str) -> inspect.Signature:
    """As the file tells it."""
    parameters = []
    for parameter, text in SIGNATURES[name]["parameters"]:
        default = inspect.Parameter.empty if text is None else _default(text)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(parameter, kind, default=default))
    return inspect.Signature(parameters)


def _default(text: str) -> Any:
    if text in _PLAIN_DEFAULTS:
        return _PLAIN_DEFAULTS[text]
    if text.startswith(("dtypes.", "ActivationType.", "QuantType.", "GateMode.", "MlaVersion.")):
        return text
    import ast

    return ast.literal_eval(text)


class Check:
    """The arguments of one call, and what was found out about them.

    Attributes:
        library: whose function is called.
        activations: types that it computes in.
        sizes: of the dimensions named so far.
    """

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        activations: set[torch.dtype],
        library: FakeAiter,
    ) -> None:
        self.library = library
        self._name = name
        self._arguments = arguments
        self.activations = activations
        self._looked_at: set[str] = set()
        self.sizes: dict[str, int] = {}

    def that(self, holds: bool, what: str) -> None:
        if not holds:
            raise DeviationError(f"{self._name}: {what}; got {self._describe()}")

    def value(self, name: str) -> Any:
        self._looked_at.add(name)
        return self._arguments[name]

    def activation(self, name: str, shape: str, dense: str = "all") -> torch.Tensor:
        """A tensor in one of the types that the library computes in."""
        return self.tensor(name, shape, *self.activations, dense=dense)

    def tensor(self, name: str, shape: str, *dtypes: torch.dtype, dense: str = "all") -> Any:
        """A tensor whose dimensions are names or numbers; a name means one size in all tensors.

        Args:
            dense: `all`, `rows` (what belongs to one index of the first dimension), or `last`.
        """
        x = self.value(name)
        self.that(isinstance(x, torch.Tensor), f"{name} must be a tensor")
        dims = shape.split()
        self.that(x.dim() == len(dims), f"{name} must be [{shape}]")
        for dim, size in zip(dims, x.shape, strict=True):
            wanted = int(dim) if dim.isdigit() else self.sizes.setdefault(dim, size)
            self.that(size == wanted, f"{name} must be [{shape}], {dim}={wanted}")
        self.that(x.dtype in dtypes, f"{name} must be of {dtypes}")
        part = {"all": x, "rows": x[:1], "last": x[(slice(0, 1),) * (x.dim() - 1)]}[dense]
        self.that(part.is_contiguous() and x.stride(-1) == 1, f"{name} must be dense ({dense})")
        return x

    def scale(self, name: str) -> torch.Tensor:
        return self.tensor(name, "1", torch.float32)

    def integers(self, name: str, shape: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self.tensor(name, shape, dtype)

    def is_default(self, *names: str) -> None:
        """These are left alone; all that nobody looked at must be, see `finish`."""
        for name in names:
            parameter = signature(self._name).parameters[name]
            self.that(self.value(name) == parameter.default, f"{name} must be left alone")

    def finish(self) -> None:
        """What no check looked at must have its default."""
        for name in self._arguments:
            if name not in self._looked_at:
                self.is_default(name)

    def _describe(self) -> str:
        def short(x: Any) -> str:
            return f"{list(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else repr(x)

        return ", ".join(f"{k}={short(v)}" for k, v in self._arguments.items())
