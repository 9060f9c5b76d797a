"""The op table: which implementations exist, which one is selected, and why.

The choice is made once, at start-up, for the platform, dtypes and shapes of the model. The first
supported implementation in the platform's order of preference is used; for each one passed over the
reason is recorded. `ATOM_OP_<NAME>=impl` overrides the choice or fails. With `--batch-invariant`
only implementations are chosen that are known to be so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from atom.environment import op_override
from atom.model_ops.op_table.op_report import OpLine, format_choices, list_choices
from atom.model_ops.op_table.pool_limits import PoolLimit, find_limits
from atom.model_ops.quant.weights import WeightFormat
from atom.platform import Platform

# KV cache layouts: plain, as described in `metadata`, unless all ops of a cache agree on another.
PLAIN = "plain"
# As described in `kernels/packed_cache.py`.
PACKED = "packed"


@dataclass(frozen=True)
class OpQuery:
    """What an implementation must support.

    Attributes:
        dtype: of weights and activations.
        shape: relevant sizes by name (`head_dim`, `in_features`, ...).
        storage: dtype of the KV cache, for ops that use one.
        weights: format of quantised weights, for ops that read them.
        down_weights: that of experts' second matrices where it is another one.
        batch_invariant: whether a row's result must not depend on its batch.
    """

    platform: Platform
    dtype: torch.dtype
    shape: Mapping[str, int]
    storage: torch.dtype | None = None
    weights: WeightFormat | None = None
    _: KW_ONLY
    down_weights: WeightFormat | None = None
    batch_invariant: bool = False


@dataclass(frozen=True)
class Implementation:
    """One implementation of an op.

    Attributes:
        name: `torch`, `native`, `triton`, `gluon`, `aiter` or `flash_mla`.
        supports: returns None if it can run, else the reason why not.
        load: imports and returns the function; called only if selected.
        layout: KV cache layout that it needs.
        load_prepare: imports and returns the function that converts weights, once after loading, to
            the layout that the op reads; None if it reads them as they are.
        note: what the choice costs, for the table of ops; "" if nothing.
        dequantises: whether that function converts quantised weights to the model's dtype.
        batch_invariant: whether the bits of a row (a query, a token) depend neither on the other
            rows nor on their number, nor on how its sequence was cut into steps.
        takes_rounded: whether a product with quantised weights may get `QuantInputs` of what its
            prepared weights say in `rounding`.
        takes_plain: whether prepared weights of quantised experts have a field `plain` for the
            matrix [out, inputs] of one more expert, behind the last, that is not quantised.
        takes_mixed: whether both matrices of experts may have formats of their own; so they may
            where weights are dequantised.
        load_into: imports and returns the function that writes its result to one more argument,
            [rows, out_features] with rows that may lie apart; None if there is none.
        load_staging: imports and returns, for a sum over the ranks, the function that gives memory
            which it reads without a copy; None if there is none.
    """

    name: str
    supports: Callable[[OpQuery], str | None]
    load: Callable[[], Any]
    layout: str = PLAIN
    load_prepare: Callable[[], Any] | None = None
    note: Callable[[OpQuery], str] = lambda _: ""
    dequantises: bool = False
    batch_invariant: bool = False
    takes_rounded: Callable[[OpQuery], bool] = lambda _: False
    takes_plain: bool = False
    takes_mixed: bool = False
    load_into: Callable[[], Any] | None = None
    load_staging: Callable[[], Any] | None = None

    def refuses(self, query: OpQuery) -> str | None:
        """Why it is not chosen; None if it can be."""
        if query.batch_invariant and not self.batch_invariant:
            return "not batch-invariant"
        if query.down_weights is not None and not (self.takes_mixed or self.dequantises):
            return f"reads experts in one format, not with {query.down_weights} down"
        return self.supports(query)


@dataclass(frozen=True)
class OpChoice:
    """The decision for one query."""

    op: str
    query: OpQuery
    name: str
    function: Any
    passed_over: tuple[tuple[str, str], ...]
    layout: str = PLAIN
    prepare: Callable[..., Any] | None = None
    note: str = ""
    dequantises: bool = False
    takes_rounded: bool = False
    takes_plain: bool = False
    into: Callable[..., None] | None = None
    staging: Callable[..., torch.Tensor | None] | None = None


def preference(platform: Platform) -> tuple[str, ...]:
    """Names of the implementations that a platform may use, best first."""
    if platform.kind == "cpu":
        return ("native", "torch", "triton")  # triton is interpreted here, for tests only
    if platform.kind == "rocm" and platform.arch in ("gfx942", "gfx950"):
        return ("aiter", "gluon", "triton", "torch")
    if platform.kind == "cuda":
        return ("flash_mla", "triton", "torch")
    return ("triton", "torch")


class OpUnavailableError(RuntimeError):
    """No implementation can run, or not the one demanded by an override; the message says why."""


class OpTable:
    """Selects the ops of one engine and records every choice.

    Args:
        batch_invariant: choose only implementations that are.
    """

    def __init__(
        self,
        platform: Platform,
        registry: Mapping[str, tuple[Implementation, ...]],
        batch_invariant: bool = False,
    ) -> None:
        self.platform = platform
        self.batch_invariant = batch_invariant
        self._registry = registry
        self._choices: dict[tuple[object, ...], OpChoice] = {}

    def resolve(
        self, op: str, dtype: torch.dtype, storage: torch.dtype | None = None, /, **shape: int
    ) -> Any:
        """The function for `op` with these dtypes and sizes.

        For ops on a KV cache, only implementations with the plain layout.

        Raises:
            OpUnavailableError: when there is none, or an override cannot be honoured.
        """
        return self._plain_choice(op, self._query(dtype, shape, storage)).function

    def resolve_weights(
        self,
        op: str,
        dtype: torch.dtype,
        weights: WeightFormat | None,
        down: WeightFormat | None = None,
        /,
        **shape: int,
    ) -> OpChoice:
        """The choice for an op on weights, whose `prepare` converts them once after loading.

        Args:
            down: `OpQuery.down_weights`.

        Raises:
            OpUnavailableError: when there is none, or an override cannot be honoured.
        """
        return self._plain_choice(op, self._query(dtype, shape, None, weights, down))

    def consider(
        self,
        op: str,
        dtype: torch.dtype,
        weights: WeightFormat,
        down: WeightFormat | None = None,
        /,
        **shape: int,
    ) -> OpChoice:
        """What `resolve_weights` would choose; it is not recorded."""
        return self._choose(op, self._query(dtype, shape, None, weights, down), PLAIN)

    def _query(
        self,
        dtype: torch.dtype,
        shape: Mapping[str, int],
        storage: torch.dtype | None = None,
        weights: WeightFormat | None = None,
        down: WeightFormat | None = None,
    ) -> OpQuery:
        return OpQuery(
            self.platform,
            dtype,
            shape,
            storage,
            weights,
            down_weights=down,
            batch_invariant=self.batch_invariant,
        )

    def _plain_choice(self, op: str, query: OpQuery) -> OpChoice:
        formats = query.weights, query.down_weights
        key = (op, query.dtype, query.storage, *formats, *sorted(query.shape.items()))
        if key not in self._choices:
            self._choices[key] = self._choose(op, query, PLAIN)
        return self._choices[key]

    def resolve_together(
        self,
        ops: tuple[str, ...],
        dtype: torch.dtype,
        storage: torch.dtype,
        /,
        **shape: int,
    ) -> tuple[Any, ...]:
        """The functions for all `ops` on one KV cache, with the same layout.

        The best of each if they agree on a layout, else the best with the plain layout.

        Raises:
            OpUnavailableError: when an op has none, or an override cannot be honoured.
        """
        keys = [(op, ops, dtype, storage, *sorted(shape.items())) for op in ops]
        if not all(key in self._choices for key in keys):
            query = self._query(dtype, shape, storage)
            choices = [self._choose(op, query) for op in ops]
            if len({choice.layout for choice in choices}) > 1:
                choices = [self._choose(op, query, PLAIN) for op in ops]
            self._choices.update(zip(keys, choices, strict=True))
        return tuple(self._choices[key].function for key in keys)

    def _choose(self, op: str, query: OpQuery, layout: str | None = None) -> OpChoice:
        """The best implementation with `layout`, or with any if None."""
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
            reason = candidate.refuses(query)
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
                    candidate.load_prepare() if candidate.load_prepare is not None else None,
                    candidate.note(query),
                    candidate.dequantises,
                    candidate.takes_rounded(query),
                    candidate.takes_plain,
                    candidate.load_into() if candidate.load_into is not None else None,
                    candidate.load_staging() if candidate.load_staging is not None else None,
                )
            passed_over.append((candidate.name, reason))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
        kind = "batch-invariant implementation" if query.batch_invariant else "implementation"
        raise OpUnavailableError(
            f"no {kind} of {op} runs on {query.platform.kind} ({query.platform.arch}) with "
            f"{query.dtype}{'' if query.weights is None else f', {query.weights}'} and "
            f"{dict(query.shape)}: {reasons}"
        )

    def _candidates(self, op: str) -> list[Implementation]:
        order = preference(self.platform)
        listed = [c for c in self._registry[op] if c.name in order]
        return sorted(listed, key=lambda candidate: order.index(candidate.name))

    def describe(self) -> str:
        """A table of the choices made so far, one row per distinct decision."""
        return format_choices(self._choices.values())

    def lines(self) -> list[OpLine]:
        """The choices made so far, one line for each op with dtypes and sizes."""
        return list_choices(self._choices.values())

    def pool_limits(self) -> list[PoolLimit]:
        """What was passed over only because the KV cache has so many blocks."""
        return find_limits(self._choices.values(), self._candidates)

    def summary(self) -> str:
        """The platform and each implementation's number of ops, in words."""
        names = Counter(name for _, name in {(c.op, c.name) for c in self._choices.values()})
        order = preference(self.platform)
        counts = ", ".join(f"{name} {names[name]}" for name in order if name in names)
        return f"{self.platform.kind} ({self.platform.arch}); kernels: {counts}"


def always(_: OpQuery) -> None:
    """For implementations without conditions."""
