"""The same steps eagerly and through graphs, side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from models.harness import ModelBench

from atom.graphs.capture import CaptureBackend, GraphKey, GraphPlan, ReexecuteBackend
from atom.graphs.runner import GraphRunner
from atom.model_ops.attention.metadata import ModelOutput
from atom.platform import Platform, cpu_platform

BLOCK_SIZE, NUM_BLOCKS = 4, 128
SIZES, BOUNDS, QUERY_LENS = (1, 2, 4), (16, 48), (1, 3)
AUX = (0, 2, 3)


class LoggingBackend:
    """Remembers the key of every replay."""

    def __init__(self, inner: CaptureBackend) -> None:
        self._inner = inner
        self.replays: list[GraphKey] = []

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        assert isinstance(work, partial)
        repeat = self._inner.capture(work)

        def replay() -> None:
            self.replays.append(work.args[0])
            repeat()

        return replay


class Pair:
    """The same sequences, eagerly and through graphs, each with a KV cache of its own.

    Args:
        tolerance: largest difference, as a share of the largest element.
    """

    def __init__(
        self,
        folder: Path,
        backend: CaptureBackend | None = None,
        platform: Platform | None = None,
        dtype: torch.dtype = torch.float32,
        tolerance: float = 1e-5,
    ) -> None:
        self.tolerance = tolerance
        self.eager, self.graphed = (
            ModelBench(folder, BLOCK_SIZE, NUM_BLOCKS, dtype=dtype, platform=platform) for _ in "12"
        )
        for bench in (self.eager, self.graphed):
            bench.model.set_aux_layer_ids(AUX)
        self.backend = LoggingBackend(backend or ReexecuteBackend())
        device = (platform or cpu_platform()).device
        plan = GraphPlan(self.backend, SIZES, BOUNDS, QUERY_LENS, BLOCK_SIZE, device)
        self.runner = GraphRunner(self.graphed.model.forward, plan)
        inputs = self.graphed.run_with(self.graphed.model.forward, self.runner)
        self.runner.capture(lambda key: inputs.graph_input(key).read)

    def step(self, tokens: dict[str, list[int]]) -> ModelOutput:
        """Run a step on both, compare all that it leaves, and return the graphed output."""
        self.eager.step(tokens)
        self.graphed.step(tokens)
        expected, output = self.eager.output, self.graphed.output
        assert expected is not None
        assert output is not None
        rows = self.graphed.rows
        self._compare(output.hidden_states[rows], expected.hidden_states)
        for found, states in zip(output.aux_hidden_states, expected.aux_hidden_states, strict=True):
            self._compare(found[rows], states)
        for own, pool in zip(owned_blocks(self.graphed), owned_blocks(self.eager), strict=True):
            self._compare(own, pool)
            assert not own[pool == 0].any()
        return output

    def _compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Up to rounding: products of more rows, and longer bounds, are added differently."""
        atol = self.tolerance * float(expected.abs().max())
        torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def owned_blocks(bench: ModelBench) -> list[torch.Tensor]:
    """The pools without the spare block that takes the rows without a slot on a GPU."""
    # [layers, 2, blocks, block_size, heads, head_dim], or [layers, blocks, block_size, latent]
    return [
        pool.narrow(2 if pool.dim() == 6 else 1, 0, NUM_BLOCKS) for pool in bench.pools.values()
    ]
