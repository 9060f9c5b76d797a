"""Every target returns the hidden states between its layers that a draft asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import checkpoints
from models.checkpoints import prompt
from models.harness import ModelBench

from atom.models.base import spread_aux_layer_ids

TARGETS = [
    checkpoints.llama,
    checkpoints.qwen3,
    checkpoints.deepseek_v2,
    checkpoints.deepseek_v3,
    checkpoints.kimi_k25,
]


@pytest.mark.parametrize("make", TARGETS, ids=lambda make: make.__name__)
def test_aux_hidden_states_equal_transformers(make, tmp_path: Path) -> None:
    checkpoint = make(tmp_path)
    tokens = prompt(21)
    *entering, final = checkpoint.hidden_states(tokens)
    bench = ModelBench(tmp_path)
    num_layers = len(entering)
    # Out of order, the embedding's output and the last layer's included.
    ids = (num_layers, 0, 2, 1)
    bench.model.set_aux_layer_ids(ids)
    bench.step({"seq": tokens})
    assert bench.output is not None
    assert len(bench.output.aux_hidden_states) == len(ids)
    for i, found in zip(ids[1:], bench.output.aux_hidden_states[1:], strict=True):
        torch.testing.assert_close(found, entering[i], atol=1e-4, rtol=0)
    norm = bench.model.get_submodule("model.norm")
    last = F.rms_norm(bench.output.aux_hidden_states[0], norm.weight.shape, norm.weight, norm.eps)
    torch.testing.assert_close(last, final, atol=1e-4, rtol=0)
    torch.testing.assert_close(bench.output.hidden_states, final, atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", TARGETS, ids=lambda make: make.__name__)
def test_asking_changes_nothing_else_and_can_be_undone(make, tmp_path: Path) -> None:
    make(tmp_path)
    bench = ModelBench(tmp_path)
    plain = bench.step({"plain": prompt(9)})["plain"]
    assert bench.output is not None
    assert bench.output.aux_hidden_states == ()
    bench.model.set_aux_layer_ids((1, 2))
    assert torch.equal(bench.step({"asked": prompt(9)})["asked"], plain)
    assert [tuple(h.shape) for h in bench.output.aux_hidden_states] == [(9, 48)] * 2
    bench.model.set_aux_layer_ids(())
    bench.step({"again": prompt(9)})
    assert bench.output.aux_hidden_states == ()


@pytest.mark.parametrize("make", TARGETS, ids=lambda make: make.__name__)
def test_aux_rows_follow_the_tokens_of_the_batch(make, tmp_path: Path) -> None:
    checkpoint = make(tmp_path)
    bench = ModelBench(tmp_path)
    bench.model.set_aux_layer_ids((2,))
    first, second = prompt(11, 1), prompt(14, 2)
    bench.step({"first": first[:7], "second": second[:13]})
    bench.step({"first": first[7:], "second": second[13:]})
    assert bench.output is not None
    (found,) = bench.output.aux_hidden_states
    torch.testing.assert_close(found[:4], checkpoint.hidden_states(first)[2][7:], atol=1e-4, rtol=0)
    torch.testing.assert_close(
        found[4:], checkpoint.hidden_states(second)[2][13:], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("ids", [(4,), (-1, 1), (0, 99)])
def test_ids_out_of_range_are_refused_with_the_numbers(
    ids: tuple[int, ...], tmp_path: Path
) -> None:
    checkpoints.llama(tmp_path)
    model = ModelBench(tmp_path).model
    with pytest.raises(ValueError, match=r"must lie in 0\.\.3 for a model of 3 layers"):
        model.set_aux_layer_ids(ids)


def test_default_ids(tmp_path: Path) -> None:
    assert spread_aux_layer_ids(61) == (2, 30, 58)
    assert spread_aux_layer_ids(32) == (2, 16, 29)
    for num_layers in range(2, 80):
        ids = spread_aux_layer_ids(num_layers)
        assert list(ids) == sorted(set(ids))
        assert ids[0] >= 0
        assert ids[-1] <= num_layers
    with pytest.raises(ValueError, match="1 layer"):
        spread_aux_layer_ids(1)
    checkpoints.llama(tmp_path)
    assert ModelBench(tmp_path).model.default_aux_layer_ids() == (0, 1, 3)
