"""What every layer is built with, passed as one argument."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.quant.base import QuantConfig, UnquantizedConfig
from atom.model_ops.registry import OpTable
from atom.platform import Platform, current_platform


@dataclass(frozen=True)
class LayerContext:
    """Attributes:
    dtype, device: of weights and activations.
    ops: selects the implementation of each op.
    group: ranks that share the weights.
    experts: ranks that hold whole experts; of size 1 when `group` shares every expert.
    quant: how weights are stored.
    activations: how the inputs of products with quantised weights are rounded: `--activations`.
    max_model_len: longest context; the size of rotary tables.
    images: whether a model that can read images is built to.
    state_dtype: of the matrices of recurrent states: `--mamba-ssm-cache-dtype`.
    """

    dtype: torch.dtype
    device: torch.device
    ops: OpTable
    max_model_len: int
    group: ParallelGroup = SINGLE
    experts: ParallelGroup = SINGLE
    quant: QuantConfig = field(default_factory=UnquantizedConfig)
    activations: str = "auto"
    images: bool = False
    state_dtype: torch.dtype = torch.float32

    @classmethod
    def create(
        cls,
        dtype: torch.dtype,
        max_model_len: int,
        platform: Platform | None = None,
        group: ParallelGroup = SINGLE,
        batch_invariant: bool = False,
    ) -> LayerContext:
        """A context on the given or the current platform, of one rank unless said otherwise."""
        platform = platform or current_platform()
        ops = OpTable(platform, OPS, batch_invariant)
        return cls(dtype, platform.device, ops, max_model_len, group)

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialised weight."""
        data = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return torch.nn.Parameter(data, requires_grad=False)
