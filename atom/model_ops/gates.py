"""What is between the two products of an expert: silu(gate) * up, or another gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class SiluGate:
    """silu(gate) * up."""

    name: ClassVar[str] = "silu"
    numbers: ClassVar[tuple[float, float]] = (0.0, 0.0)


@dataclass(frozen=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), both cut off at `limit`, gate only above (gpt-oss).

    Experts with it have biases, and are stored as gpt-oss has them: where one tensor has those of
    all, gate and up take turns, and numbers are [experts, inputs, outputs].
    """

    alpha: float
    limit: float
    name: ClassVar[str] = "clamped"

    @property
    def numbers(self) -> tuple[float, float]:
        """As kernels take them."""
        return self.alpha, self.limit


@dataclass(frozen=True)
class SituGate:
    """The op `situ_and_mul` (Kimi-K3)."""

    beta: float
    linear_beta: float
    name: ClassVar[str] = "situ"

    @property
    def numbers(self) -> tuple[float, float]:
        """As kernels take them."""
        return self.beta, self.linear_beta


Gate = SiluGate | ClampedGate | SituGate
SILU = SiluGate()
_OTHERS = (ClampedGate, SituGate)


def gate_shape(gate: Gate) -> dict[str, int]:
    """What a query for experts says of their gate: nothing of silu, `situ=1` of `SituGate`."""
    return {} if isinstance(gate, SiluGate) else {gate.name: 1}


def refuses_gates(shape: Mapping[str, int], *taken: type[Gate]) -> str | None:
    """Why the gate of a query's `shape` is not supported; None if it is silu or one of `taken`."""
    for gate in _OTHERS:
        if shape.get(gate.name) and gate not in taken:
            return f"has no {gate.name} gate between the products of experts"
    return None
