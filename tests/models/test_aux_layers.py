"""What a draft's layer ids name is told by their field, and every way to say it agrees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.models.base import spread_aux_layer_ids
from atom.models.config.aux_layers import AUX_FIELDS, BOUNDARY, OUTPUT, AuxLayers

AMBIGUOUS = "eagle_aux_hidden_state_layer_ids"


def resolve(field: str, *ids: int, num_layers: int, stated: str | None = None) -> tuple[int, ...]:
    return AuxLayers(field, ids).resolve(num_layers, stated)[0]


def test_the_field_decides() -> None:
    assert AuxLayers("target_layer_ids", (2, 30, 57)).resolve(61) == ((3, 31, 58), OUTPUT)
    assert AuxLayers("aux_hidden_state_layer_ids", (1, 2)).resolve(61) == ((1, 2), BOUNDARY)
    assert resolve("target_layer_ids", -1, 4, num_layers=8) == (0, 5)


def test_of_the_field_that_is_used_both_ways_the_ids_decide() -> None:
    assert AuxLayers(AMBIGUOUS, (2, 30, 58)).resolve(61) == ((2, 30, 58), BOUNDARY)
    assert AuxLayers(AMBIGUOUS, (1, 29, 57)).resolve(61) == ((2, 30, 58), OUTPUT)
    assert resolve(AMBIGUOUS, 2, 1, 3, num_layers=4) == (2, 1, 3)
    assert resolve(AMBIGUOUS, 1, 17, 36, num_layers=36) == (1, 17, 36)


@pytest.mark.parametrize("field", AUX_FIELDS)
def test_the_user_comes_first(field: str) -> None:
    assert AuxLayers(field, (1, 5)).resolve(8, BOUNDARY) == ((1, 5), BOUNDARY)
    assert AuxLayers(field, (2, 7)).resolve(8, OUTPUT) == ((3, 8), OUTPUT)


@pytest.mark.parametrize(
    ("field", "ids", "message"),
    [
        (AMBIGUOUS, (), "at least one"),
        (AMBIGUOUS, (2, 2, 3), "distinct"),
        (AMBIGUOUS, (2, 5), r"\[2, 5\] of eagle_aux.* \(boundary ids\) must lie in 0\.\.4"),
        ("target_layer_ids", (1, 4), r"\(output ids\) must lie in -1\.\.3 for a target of 4"),
        ("aux_hidden_state_layer_ids", (0, -1), r"0\.\.4"),
        ("target_layer_ids", (1, 3), "the final norm.*draft_aux_layer_convention=output"),
    ],
)
def test_impossible_ids_are_refused(field: str, ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AuxLayers(field, ids).resolve(4)


@settings(max_examples=50)
@given(st.integers(7, 200))
def test_the_default_is_the_same_in_every_field(num_layers: int) -> None:
    default = spread_aux_layer_ids(num_layers)
    outputs = tuple(i - 1 for i in default)
    assert resolve(AMBIGUOUS, *default, num_layers=num_layers) == default
    assert resolve(AMBIGUOUS, *outputs, num_layers=num_layers) == default
    assert resolve("target_layer_ids", *outputs, num_layers=num_layers) == default
    assert resolve("aux_hidden_state_layer_ids", *default, num_layers=num_layers) == default
