"""Both published conventions of aux layer ids name the same hidden states."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.models.base import spread_aux_layer_ids
from atom.models.eagle3.aux_layers import AuxConvention, resolve_aux_layer_ids


def test_both_conventions_of_one_draft_agree() -> None:
    boundary = resolve_aux_layer_ids((2, 30, 58), 61)
    output = resolve_aux_layer_ids([1, 29, 57], 61)
    assert boundary == ((2, 30, 58), AuxConvention.BOUNDARY)
    assert output == ((2, 30, 58), AuxConvention.OUTPUT)


def test_the_first_entry_alone_decides() -> None:
    assert resolve_aux_layer_ids((2, 1, 3), 3)[0] == (2, 1, 3)
    assert resolve_aux_layer_ids((1, 2, 0), 3)[0] == (2, 3, 1)
    assert resolve_aux_layer_ids((0, 1), 3)[0] == (0, 1)


@pytest.mark.parametrize(
    ("ids", "num_layers", "message"),
    [
        ((), 4, "at least one"),
        ((2, 2, 3), 4, "distinct"),
        ((2, 5), 4, r"\[2, 5\] \(boundary ids\) must lie in 0\.\.4 for a target of 4 layers"),
        ((1, 4), 4, r"\[1, 4\] \(output ids\) must lie in 0\.\.3 for a target of 4 layers"),
        ((0, -1), 4, r"0\.\.4"),
    ],
)
def test_impossible_ids_are_refused(ids: tuple[int, ...], num_layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_aux_layer_ids(ids, num_layers)


@settings(deadline=None, max_examples=50)
@given(st.integers(7, 200))
def test_output_ids_of_the_default_resolve_to_the_default(num_layers: int) -> None:
    default = spread_aux_layer_ids(num_layers)
    assert resolve_aux_layer_ids(default, num_layers)[0] == default
    outputs = [i - 1 for i in default]
    assert resolve_aux_layer_ids(outputs, num_layers)[0] == default
