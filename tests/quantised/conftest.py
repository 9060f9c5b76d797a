"""Fixtures of the quantised formats' tests."""

from __future__ import annotations

import pytest

from atom.model_loader import weights
from atom.model_ops.kernels.torch import quant
from atom.model_ops.quant import inputs


@pytest.fixture
def exact_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights alone are compared: inputs stay as they are, which torch's products can do."""
    monkeypatch.setenv("ATOM_OP_QUANT_LINEAR", "torch")
    monkeypatch.setattr(quant.DenseWeights, "round_inputs", lambda _, x: x)


@pytest.fixture(autouse=True)
def weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats are compared as they are on every device: without what only CPUs round."""
    monkeypatch.setattr(inputs, "_is_weight_only", lambda _: False)
    monkeypatch.setattr(weights, "on_platform", lambda quantization, _: quantization)
