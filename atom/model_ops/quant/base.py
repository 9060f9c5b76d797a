"""Which format each layer's weights have, and how a checkpoint stores them.

A format is a `QuantMethod`: a description of the checkpoint's tensors, from which `MatrixStorage`
creates, cuts and loads parameters, and a function that converts them to `QuantWeights`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch

from atom.config import ConfigError
from atom.model_ops.quant.weights import QuantWeights, WeightFormat

LayerKind = Literal["linear", "experts", "head", "embedding"]

_LARGEST_SIZE = 1 << 16


@dataclass(frozen=True)
class Axis:
    """One dimension of a stored tensor.

    Attributes:
        of: it runs along the matrix' outputs, its inputs, or neither (`all`): not cut for a rank.
        per: outputs or inputs per index; for `all` the number of indices.
    """

    of: Literal["out", "in", "all"]
    per: int = 1


OUT = Axis("out")
IN = Axis("in")


@dataclass(frozen=True)
class StoredTensor:
    """One of the tensors that a checkpoint stores for each matrix.

    Attributes:
        axes: of one matrix. Without an `out` axis there is one such tensor per stacked matrix.
        dtype: of the parameter.
        holds: `numbers` are converted between floating-point types by value; `codes` must have the
            dtype's size and are taken bit by bit; `exponents` are e8m0 bytes; `shape` is
            [out, in] of the matrix, which is checked; `zeros` are checked and dropped.
        is_optional: a checkpoint may lack it; the parameter is `fill` then.
        gate_up_alternate: if one tensor holds gate and up of all experts, their rows take turns;
            else the rows of gate come first.
        is_derived: `read` computes it from another one, of whole matrices, on the parameters'
            device; checkpoints do not have it. Dummy weights are `fill`.
    """

    axes: tuple[Axis, ...]
    dtype: torch.dtype
    holds: Literal["numbers", "codes", "exponents", "shape", "zeros"] = "codes"
    is_optional: bool = False
    fill: float = 0.0
    gate_up_alternate: bool = False
    is_derived: bool = False


class QuantMethod(ABC):
    """The format of one layer's weights.

    Attributes:
        format: of the converted weights.
        stored: the checkpoint's tensors by name, such as `weight_packed`; for a layer `a.b` it is
            stored as `a.b.weight_packed`.
    """

    format: WeightFormat
    stored: Mapping[str, StoredTensor]

    def read(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The stored tensors that one tensor of the checkpoint gives; mostly itself.

        Raises:
            ValueError: when it cannot be of this format.
        """
        return {name: tensor}

    @abstractmethod
    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        """Convert this rank's stored tensors, once after loading.

        Args:
            tensors: by name, with the axes of `stored`; experts are a leading dimension. Those
                without an `out` axis have a dimension [stacked matrices] before their axes.
            rows, columns: outputs of each stacked matrix, and inputs.

        Raises:
            ValueError: when their values are of no use.
        """


def are_alike(*methods: QuantMethod | None) -> bool:
    """Whether weights of all these methods can be parts of one product."""
    described = [
        method and (type(method), method.format, dict(method.stored)) for method in methods
    ]
    return all(other == described[0] for other in described)


class QuantConfig(Protocol):
    """A checkpoint's quantisation: selects the method of each layer."""

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        """The method of a layer; None if it is not quantised.

        Args:
            prefix: the layer's name in the checkpoint.
            parts: names of the checkpoint's modules that are stacked in it; () for itself.

        Raises:
            ConfigError: when the parts have different formats.
        """
        ...


@runtime_checkable
class SplitsLayers(Protocol):
    """A quantisation whose layers may have parts in several formats."""

    def splits(self, parts: Sequence[str]) -> bool:
        """Whether these parts of a layer differ, so that each is a product of its own."""
        ...


class UnquantizedConfig:
    """No layer is quantised."""

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        return None


class Header(NamedTuple):
    """What a weight file's header says of a tensor; `dtype` is None for those unknown to torch."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]


def read_size(where: str, key: str, value: object) -> int:
    """How many weights of one dimension share a scale.

    Raises:
        ConfigError: when it is not an integer from 1 to 65536.
    """
    if type(value) is not int or not 0 < value <= _LARGEST_SIZE:
        raise ConfigError(f"{where}: {key}={value!r} is no size from 1 to {_LARGEST_SIZE}")
    return value
