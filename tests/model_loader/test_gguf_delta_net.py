"""Names and orders of linear attention in GGUF files."""

from __future__ import annotations

import pytest

from atom.model_loader.gguf.delta_net import column_order, prediction_name, row_order

# Two heads of keys with three of values each.
CONFIG = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 2,
}
HEADS = [0, 2, 4, 1, 3, 5]
ELEMENTS = [2 * head + i for head in HEADS for i in range(2)]
LAYER = "model.layers.0.linear_attn."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.input_layernorm.weight", "model.layers.3.input_layernorm.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("model.layers.4.enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
        ("model.layers.5.mlp.up_proj.weight", "mtp.layers.1.mlp.up_proj.weight"),
    ],
)
def test_what_lies_behind_the_last_layer_predicts(name: str, expected: str) -> None:
    assert prediction_name(name, 4) == expected


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("in_proj_b.weight", HEADS),
        ("A_log", HEADS),
        ("in_proj_z.weight", ELEMENTS),
        ("in_proj_qkv.weight", [*range(16), *(16 + e for e in ELEMENTS)]),
        ("norm.weight", None),
    ],
)
def test_rows_of_values_lie_by_their_number_within_a_head(
    module: str, expected: list[int] | None
) -> None:
    found = row_order(LAYER + module, "blk.0.ssm_x.weight", True, CONFIG)
    assert (None if found is None else found.tolist()) == expected
    assert row_order(LAYER + module, "blk.0.ssm_x.weight", False, CONFIG) is None
    assert (
        row_order("model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight", True, CONFIG) is None
    )


def test_two_projections_alternate_by_heads() -> None:
    parts = [
        row_order(f"{LAYER}in_proj_{part}.weight", "blk.0.ssm_ba.weight", False, CONFIG)
        for part in "ba"
    ]
    assert [part.tolist() for part in parts if part is not None] == [
        [0, 1, 2, 6, 7, 8],
        [3, 4, 5, 9, 10, 11],
    ]


def test_columns_are_those_of_what_reads_the_values() -> None:
    found = column_order(f"{LAYER}out_proj.weight", True, CONFIG)
    assert found is not None
    assert found.tolist() == ELEMENTS
    assert column_order(f"{LAYER}out_proj.weight", False, CONFIG) is None
    assert column_order(f"{LAYER}in_proj_z.weight", True, CONFIG) is None
