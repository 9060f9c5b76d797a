"""What several_gpus.py measures on each rank: sums over the ranks, and layers that need them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _decode_shapes import SHAPES, write_configs
from _device import time_calls

from atom.config import ModelOptions
from atom.distributed.parallel_state import ParallelGroup
from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import build_model
from atom.model_ops.attention.metadata import AttentionMetadata, ModelInput
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpTable
from atom.models.base import CausalLM
from atom.models.registry import create_model
from atom.platform import Platform

SUMS = ("all_reduce", "all_reduce_add_rms_norm")
_EPS = 1e-5
_BLOCK_SIZE = 64
# Sums in a row: a graph of one is mostly its launch.
_SUMS_AT_ONCE = 16


@dataclass(frozen=True)
class RankSetup:
    """One rank's place and what it measures.

    Attributes:
        shape: of the layers, with a hidden size for the sums.
        context: cached tokens of every sequence.
    """

    platform: Platform
    group: ParallelGroup
    dtype: torch.dtype
    shape: str
    context: int

    @property
    def hidden_size(self) -> int:
        return int(SHAPES[self.shape].target["hidden_size"])


def table_of(platform: Platform, sums: str) -> OpTable:
    """All ops, with sums over the ranks by one implementation."""
    only = {op: tuple(entry for entry in OPS[op] if entry.name == sums) for op in SUMS}
    return OpTable(platform, {**OPS, **only})


class Sum:
    """The sum of one tensor a rank; with the norm that follows, for the op that has it.

    Raises:
        OpUnavailableError: when the implementation cannot run here.
    """

    def __init__(self, setup: RankSetup, op: str, implementation: str) -> None:
        self._setup, self._op = setup, op
        group, size = setup.group, setup.hidden_size
        ops = table_of(setup.platform, implementation)
        shape = {"size": size, "num_ranks": group.size, "peer_access": group.peer_access}
        self._function: Any = ops.resolve(op, setup.dtype, **shape)
        self._norm = ops.resolve("add_rms_norm", setup.dtype, size=size)
        device = setup.platform.device
        self._weight = torch.ones(size, dtype=setup.dtype, device=device)

    def __call__(self, partial: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Rows [T, hidden] -> their sum with the residual, or without where no norm follows."""
        if self._op == "all_reduce":
            out: torch.Tensor = self._function(partial, self._setup.group)
            return out
        given = partial, residual, self._weight, _EPS, self._setup.group, self._norm
        total: torch.Tensor = self._function(*given)[1]
        return total

    def is_right(self, rows: int) -> bool:
        """Whether it adds up small integers, which every dtype holds, exactly."""
        group = self._setup.group
        pattern = torch.arange(rows * self._setup.hidden_size, device=self._weight.device) % 7
        pattern = pattern.view(rows, -1).to(self._setup.dtype)
        found = self(pattern * (group.rank + 1), torch.zeros_like(pattern))
        return torch.equal(found, pattern * (group.size * (group.size + 1) // 2))

    def seconds(self, rows: int) -> float:
        shape = _SUMS_AT_ONCE, rows, self._setup.hidden_size
        partials = torch.zeros(shape, dtype=self._setup.dtype, device=self._weight.device)
        residual = torch.zeros_like(partials[0])

        def call(partial: torch.Tensor) -> Callable[[], object]:
            return lambda: self(partial, residual)

        return time_calls([call(p) for p in partials], partials.device).seconds


class Layers:
    """This rank's share of a few layers with experts, on dummy weights, as they decode.

    Args:
        sums: the implementation of both ops that add over the ranks.
    """

    def __init__(self, setup: RankSetup, sums: str, most_rows: int) -> None:
        self._setup = setup
        context = LayerContext.create(setup.dtype, setup.context + 1, setup.platform, setup.group)
        context = replace(context, ops=table_of(setup.platform, sums))
        with tempfile.TemporaryDirectory() as folder:
            target, _ = write_configs(Path(folder), SHAPES[setup.shape], setup.context + 1)
            options = ModelOptions(str(target), load_format="dummy")
            source = resolve_model(options)
        create = partial(create_model, source.hf_config)
        self.model: CausalLM = build_model(create, source, context, options)
        layers = attention_layers(self.model)
        self.count = len(layers)
        self._per_sequence = -(-setup.context // _BLOCK_SIZE)
        cache = PagedCache(layers, _BLOCK_SIZE, setup.dtype, context.device)
        cache.allocate_kv_cache_tensors(most_rows * self._per_sequence)
        bind_kv_caches(self.model, [cache])

    def seconds(self, rows: int) -> float:
        """Of one layer, in a step in which `rows` sequences decode."""
        given = self._input(rows)
        timing = time_calls([lambda: self.model(given)], self._setup.platform.device)
        return timing.seconds / self.count

    def _input(self, rows: int) -> ModelInput:
        device, context = self._setup.platform.device, self._setup.context

        def integers(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        blocks = self._per_sequence
        tables = torch.arange(rows * blocks, dtype=torch.int32, device=device).view(rows, blocks)
        attention = AttentionMetadata(
            slot_mapping=integers([-1] * rows, torch.int64),
            block_tables=tables,
            block_counts=integers([blocks] * rows, torch.int32),
            context_lens=integers([context] * rows, torch.int32),
            cu_seqlens_q=integers(range(rows + 1), torch.int32),
            max_seqlen_q=1,
            max_context_len=context,
            query_lens_cpu=(1,) * rows,
            context_lens_cpu=None,
        )
        vocab = int(SHAPES[self._setup.shape].target["vocab_size"])
        ids = [7 * i % vocab for i in range(rows)]
        positions = integers([context - 1] * rows, torch.int64)
        return ModelInput(integers(ids, torch.int64), positions, attention)
