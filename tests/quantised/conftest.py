"""A fixture of the quantised formats' tests."""

from __future__ import annotations

import pytest

from atom.model_ops.kernels.torch import quant


@pytest.fixture
def exact_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights alone are compared: inputs stay as they are, which torch's products can do."""
    monkeypatch.setenv("ATOM_OP_QUANT_LINEAR", "torch")
    monkeypatch.setattr(quant.DenseWeights, "round_inputs", lambda _, x: x)
