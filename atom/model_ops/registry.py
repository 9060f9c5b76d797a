"""One table of operations: which implementations exist, which one runs, and why.

An implementation is chosen once, at start-up, from the platform, the data types and the model's
real shapes. The first supported one in the platform's order of preference wins; a reason is kept
for every one passed over. `ATOM_OP_<NAME>=impl` overrides the choice or fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atom.config import op_override
from atom.model_ops.op_report import format_choices
from atom.platform import Platform

# How the bytes of a KV cache lie unless all ops that touch it agree on something else: as the
# cache tensors of `metadata` say.
PLAIN = "plain"
# As `kernels/aiter/layout.py` says.
PACKED = "packed"


@dataclass(frozen=True)
class OpQuery:
    """What an implementation is asked to support.

    Attributes:
        dtype: of weights and activations.
        shape: the sizes that matter to the op, by name (`head_dim`, `in_features`, ...).
        storage: the type of the KV cache, for ops that read or write one.
    """

    platform: Platform
    dtype: torch.dtype
    shape: Mapping[str, int]
    storage: torch.dtype | None = None


@dataclass(frozen=True)
class Implementation:
    """One way to run an op.

    Attributes:
        name: `torch`, `native`, `triton`, `gluon` or `aiter`.
        supports: None when it can run, else the reason why not.
        load: imports and returns what runs; called only when chosen.
        layout: how it wants the bytes of the KV cache that it touches to lie.
    """

    name: str
    supports: Callable[[OpQuery], str | None]
    load: Callable[[], Any]
    layout: str = PLAIN


@dataclass(frozen=True)
class OpChoice:
    """What was decided for one query."""

    op: str
    query: OpQuery
    name: str
    function: Any
    passed_over: tuple[tuple[str, str], ...]
    layout: str = PLAIN


def preference(platform: Platform) -> tuple[str, ...]:
    """Names of implementations, best first; a platform runs no others."""
    if platform.kind == "cpu":
        return ("native", "torch", "triton")  # triton is interpreted: for tests, never for speed
    if platform.kind == "rocm" and platform.arch in ("gfx942", "gfx950"):
        return ("aiter", "gluon", "triton", "torch")
    return ("triton", "torch")


class OpUnavailableError(RuntimeError):
    """No implementation, or not the one the user demanded, can run; the message says why."""


class OpTable:
    """Resolves ops for one engine and remembers every choice."""

    def __init__(
        self, platform: Platform, registry: Mapping[str, tuple[Implementation, ...]]
    ) -> None:
        self.platform = platform
        self._registry = registry
        self._choices: dict[tuple[object, ...], OpChoice] = {}

    def resolve(
        self, op: str, dtype: torch.dtype, storage: torch.dtype | None = None, /, **shape: int
    ) -> Any:
        """The function that runs `op` for these data types and this shape.

        Of an op on a KV cache, one that leaves the cache in its plain layout.

        Raises:
            OpUnavailableError: when nothing can, or an override cannot be honoured.
        """
        key = (op, dtype, storage, *sorted(shape.items()))
        if key not in self._choices:
            query = OpQuery(self.platform, dtype, shape, storage)
            self._choices[key] = self._choose(op, query, PLAIN)
        return self._choices[key].function

    def resolve_together(
        self,
        ops: tuple[str, ...],
        dtype: torch.dtype,
        storage: torch.dtype,
        /,
        **shape: int,
    ) -> tuple[Any, ...]:
        """The functions that run all `ops` on one KV cache, in one layout of its bytes.

        The best of each, when they want the same layout; else the best of each in the plain one.

        Raises:
            OpUnavailableError: when there is none for an op, or an override cannot be honoured.
        """
        keys = [(op, ops, dtype, storage, *sorted(shape.items())) for op in ops]
        if not all(key in self._choices for key in keys):
            query = OpQuery(self.platform, dtype, shape, storage)
            choices = [self._choose(op, query) for op in ops]
            if len({choice.layout for choice in choices}) > 1:
                choices = [self._choose(op, query, PLAIN) for op in ops]
            self._choices.update(zip(keys, choices, strict=True))
        return tuple(self._choices[key].function for key in keys)

    def _choose(self, op: str, query: OpQuery, layout: str | None = None) -> OpChoice:
        """The best implementation that keeps the cache in `layout`; in any, without one."""
        candidates = self._candidates(op)
        wanted = op_override(op)
        names = dict.fromkeys(candidate.name for candidate in candidates)
        if wanted is not None and wanted not in names:
            raise OpUnavailableError(
                f"ATOM_OP_{op.upper()}={wanted}: {self.platform.kind} ({self.platform.arch}) has "
                f"no such implementation; it has {', '.join(names)}"
            )
        passed_over: list[tuple[str, str]] = []
        for candidate in candidates:
            if wanted is not None and candidate.name != wanted:
                passed_over.append((candidate.name, f"ATOM_OP_{op.upper()}={wanted}"))
                continue
            reason = candidate.supports(query)
            if reason is None and layout not in (None, candidate.layout):
                reason = f"keeps the cache {candidate.layout}, other ops on it keep it {layout}"
            if reason is None:
                return OpChoice(
                    op,
                    query,
                    candidate.name,
                    candidate.load(),
                    tuple(passed_over),
                    candidate.layout,
                )
            passed_over.append((candidate.name, reason))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
        raise OpUnavailableError(
            f"no implementation of {op} runs on {query.platform.kind} ({query.platform.arch}) with "
            f"{query.dtype} and {dict(query.shape)}: {reasons}"
        )

    def _candidates(self, op: str) -> list[Implementation]:
        order = preference(self.platform)
        listed = [c for c in self._registry[op] if c.name in order]
        return sorted(listed, key=lambda candidate: order.index(candidate.name))

    def describe(self) -> str:
        """The choices made so far, a row for each distinct decision."""
        return format_choices(self._choices.values())


def always(_: OpQuery) -> None:
    """For implementations without conditions."""
