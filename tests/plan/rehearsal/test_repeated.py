"""Equal layers of a step count as one of them that ran."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from atom.plan.rehearsal.meter import Meter
from atom.plan.rehearsal.repeated import RepeatedLayers

ROWS, SIZE = 64, 32


class Metadata:
    """Of one step: what its first layer makes for all."""

    def __init__(self) -> None:
        self.shared: torch.Tensor | None = None


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.calls = 0

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        inputs: tuple[torch.Tensor, Metadata, object],
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        positions, metadata, _ = inputs
        if metadata.shared is None:
            metadata.shared = positions + 1
        if rows is not None:
            x, residual = x[rows], residual[rows]
        wide = x.new_empty(len(x), self.width).relu_()
        return wide.sum(1, keepdim=True) + x, residual + x


def steps(meter: Meter, layers: list[Layer]) -> list[tuple[int, int, int]]:
    """Peak, launches and what lives after each of two steps; the last layer takes some rows."""
    rows = torch.arange(4, device="meta")
    found = []
    with meter:
        for count in (ROWS, 2 * ROWS):
            x = torch.empty(count, SIZE, device="meta")
            residual, metadata, kept = x.relu(), Metadata(), []

            def work() -> None:
                hidden, carried = x, residual  # noqa: B023
                for layer in layers:
                    last = rows if layer is layers[-1] else None
                    kept.append(carried)  # noqa: B023
                    hidden, carried = layer(hidden, carried, (x, metadata, None), last)  # noqa: B023

            before = meter.launches.total
            peak = meter.peak_of(work)
            found.append((peak, meter.launches.total - before, meter.live))
    return found


def both(create: Callable[[], list[Layer]]) -> list[Layer]:
    """The layers that counted, after a check that they count as those that run."""
    expected = steps(Meter(), create())
    meter, layers = Meter(), create()
    RepeatedLayers(meter).count(layers)
    assert steps(meter, layers) == expected
    return layers


def test_two_equal_layers_of_a_step_run() -> None:
    layers = both(lambda: [Layer(128) for _ in range(9)])
    # In two steps, and the last layer has other arguments.
    assert [layer.calls for layer in layers] == [2, 2, 0, 0, 0, 0, 0, 0, 2]


def test_layers_of_each_kind_run() -> None:
    layers = both(lambda: [Layer(SIZE << i % 2) for i in range(9)])
    assert [layer.calls for layer in layers] == [2, 2, 2, 2, 0, 0, 0, 0, 2]
