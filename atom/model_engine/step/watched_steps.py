"""Steps whose reads and writes of the KV cache are watched, with `--debug-kv-canary`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from atom.batch import LaunchedStep, ScheduledBatch, StepOutput
from atom.kv_cache.canary import KVCanary
from atom.model_engine.step.input_builder import InputBuilder, StepInput

Launch = Callable[[ScheduledBatch], LaunchedStep]


class WatchedInputs(InputBuilder):
    """Keeps the newest step's inputs.

    Attributes:
        newest: None before the first step.
    """

    newest: StepInput | None = None

    def build(self, batch: ScheduledBatch) -> StepInput:
        self.newest = super().build(batch)
        return self.newest


class WatchedRunner:
    """Runs steps and shows them to the canary, in the order in which their results are read.

    Args:
        launch: of the runner.
        inputs: the runner's.
    """

    def __init__(self, launch: Launch, inputs: InputBuilder, canary: KVCanary) -> None:
        assert isinstance(inputs, WatchedInputs)
        self._launch = launch
        self._inputs = inputs
        self._canary = canary

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """As the runner's; its results are checked once they are there."""
        launched = self._launch(batch)
        if batch.sequences:
            assert self._inputs.newest is not None
            # The next step will write its own in their place.
            tables = self._inputs.newest.model_input.attention.block_tables.clone()
        else:
            tables = torch.empty(0, 0, dtype=torch.int32)

        def collect() -> StepOutput:
            output = launched.collect()
            self._canary.check(batch, tables.cpu().numpy(), output.sequences)
            return output

        return msgspec.structs.replace(launched, collect=collect)
