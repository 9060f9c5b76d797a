"""Detects which functions of other libraries are usable here; a failure is a reason, not an error.

A library is imported only by a torch that is built for its devices, since elsewhere its import
fails in various ways. Functions change between releases, so the parameters that the adapters use
are compared with the actual signatures.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from atom.model_ops.kernels.aiter_modules import give_folder

Function = Callable[..., Any]

# What torch must be built for, by library.
_DEVICES = {"aiter": "ROCm", "flash_mla": "CUDA"}
# The package that aiter is installed as.
_AITER = "amd-aiter"


@dataclass(frozen=True, eq=False)
class EntryPoint:
    """A library's function and the parameters that an adapter passes; or a constant of it.

    As of the main branches of aiter on 2026-08-22 and of FlashMLA on 2026-04-29.

    Attributes:
        where: `module:name`.
        positional: names of the leading parameters, passed by position, separated by spaces.
        keywords: names of parameters passed by name.
    """

    where: str
    positional: str
    keywords: str = ""

    @property
    def library(self) -> str:
        return self.module.partition(".")[0]

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    @property
    def name(self) -> str:
        return self.where.partition(":")[2]


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed_requirements() -> Sequence[str]:
    """What aiter's package demands; nothing of one that is not installed as a package."""
    try:
        return importlib.metadata.requires(_AITER) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def _has_program(name: str) -> bool:
    return shutil.which(name) is not None


@dataclass(frozen=True)
class Library:
    """What is installed, or a test's substitute.

    Attributes:
        load: returns a module's contents by name; may raise anything.
        extra_dtypes: dtypes that it supports beyond a library's own. A substitute that computes in
            float32 allows comparing whole models token by token.
        version_of: version of an installed package, or None.
        requirements: returns what aiter's package demands, such as `flydsl==0.3.1`.
        has_program: whether a program of this name can be started.
    """

    load: Callable[[str], Mapping[str, Any]]
    extra_dtypes: frozenset[torch.dtype] = frozenset()
    version_of: Callable[[str], str | None] = _installed_version
    requirements: Callable[[], Sequence[str]] = _installed_requirements
    has_program: Callable[[str], bool] = _has_program


class _Findings:
    """Cache of entry point lookups in one library."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._modules: dict[str, Mapping[str, Any] | str] = {}
        self._functions: dict[EntryPoint, Function | str] = {}

    def find(self, entry: EntryPoint) -> Function | str:
        """The function, or why it cannot be used."""
        if entry not in self._functions:
            self._functions[entry] = self._look_up(entry)
        return self._functions[entry]

    def _look_up(self, entry: EntryPoint) -> Function | str:
        whole = self.module(entry.library)
        contents = whole if isinstance(whole, str) else self.module(entry.module)
        if isinstance(contents, str):
            return contents
        function = contents.get(entry.name)
        if function is None:
            return f"this {entry.library} has no {entry.module}.{entry.name}"
        return _changed(entry, function) or function

    def module(self, name: str) -> Mapping[str, Any] | str:
        """A module's contents, or why it cannot be imported."""
        if name not in self._modules:
            try:
                self._modules[name] = self.library.load(name)
            except Exception as error:
                what = " ".join(str(error).split())
                self._modules[name] = f"import {name}: {type(error).__name__}: {what}"
        return self._modules[name]


def version() -> str | None:
    """aiter's version, from the module that its build writes; None when it does not tell."""
    findings = _findings("aiter")
    contents = findings if isinstance(findings, str) else findings.module("aiter._version")
    told = None if isinstance(contents, str) else contents.get("__version__")
    return told if isinstance(told, str) else None


def refusal(*entries: EntryPoint) -> str | None:
    """Why these entry points cannot all be used; None if they can."""
    for entry in entries:
        if isinstance(found := _find(entry), str):
            return found
    return None


def lacks_package(name: str) -> str | None:
    """Why a package that aiter calls at run time cannot serve it; None if it can.

    It must be there, and where aiter demands one version, in that one.
    """
    library = _library()
    exact = [line for line in library.requirements() if line.startswith(f"{name}==")]
    wanted = exact[0].partition(";")[0].strip() if exact else name
    found = library.version_of(name)
    if found is None:
        return f"{name} is not installed: pip install {wanted}"
    if exact and found.partition("+")[0] != wanted.partition("==")[2]:
        return f"{name} {found} is installed, and aiter demands another: pip install {wanted}"
    return None


def lacks_programs(*names: str) -> str | None:
    """Which of these programs, that aiter starts at run time, are not on PATH; None if all are."""
    missing = [name for name in names if not _library().has_program(name)]
    return f"no {' and no '.join(missing)} on PATH" if missing else None


@functools.cache
def function(entry: EntryPoint) -> Function:
    """The function of an entry point.

    Raises:
        RuntimeError: when it is unusable; callers must check `refusal` first.
    """
    if isinstance(found := _find(entry), str):
        raise RuntimeError(f"{entry.library}'s {entry.name} cannot be used: {found}")
    return found


def extra_dtypes() -> frozenset[torch.dtype]:
    return _library().extra_dtypes


@contextmanager
def replaced(library: Library) -> Iterator[None]:
    """Use `library` instead of all that are installed, for tests."""
    _replacements.append(_Findings(library))
    function.cache_clear()
    try:
        yield
    finally:
        _replacements.pop()
        function.cache_clear()


_replacements: list[_Findings] = []


def _find(entry: EntryPoint) -> Function | str:
    findings = _findings(entry.library)
    return findings if isinstance(findings, str) else findings.find(entry)


def _findings(library: str) -> _Findings | str:
    """What is found out about a library, or why it is not imported."""
    if _replacements:
        return _replacements[-1]
    builds = {"ROCm": torch.version.hip, "CUDA": torch.version.cuda}
    if builds[_DEVICES[library]] is None:
        return f"torch is not built for {_DEVICES[library]}"
    return _installed()


def _library() -> Library:
    return _replacements[-1].library if _replacements else _installed().library


@functools.cache
def _installed() -> _Findings:
    return _Findings(Library(_import))


def _import(module: str) -> Mapping[str, Any]:
    if module.partition(".")[0] == "aiter":
        _give_aiter_its_folder()
    return vars(importlib.import_module(module))


@functools.cache
def _give_aiter_its_folder() -> None:
    """Once, before its first module is imported."""
    give_folder()


def _changed(entry: EntryPoint, function: Function) -> str | None:
    """How the signature differs from what the adapters use; None if it does not.

    A wrapper that accepts anything cannot be checked; then errors appear in the call. A class is an
    enumeration.
    """
    if inspect.isclass(function):
        return None
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return None
    names, positional = list(parameters), entry.positional.split()
    required = [n for n, p in parameters.items() if p.default is p.empty]
    if names[: len(positional)] != positional or not set(required) <= set(positional):
        given, wanted = ", ".join(required), ", ".join(positional)
        return f"this {entry.library}'s {entry.name} takes ({given}), not ({wanted})"
    if missing := sorted(set(entry.keywords.split()) - set(names)):
        return f"this {entry.library}'s {entry.name} has no parameter {', '.join(missing)}"
    return None
