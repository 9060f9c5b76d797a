"""Targets over several ranks compute what they compute on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.harness import ModelBench
from quantised import test_awq
from quantised.compressed import FORMATS
from quantised.conftest import exact_activations as exact_activations
from quantised.conftest import weights_alone as weights_alone
from quantised.packing import Pack, quantised
from quantised.test_compressed_tensors import KIMI_IGNORES, of_experts
from ranks import run_ranks

from atom.config import ConfigError
from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.model_ops.attention.mha import Attention

TOKENS = checkpoints.prompt(12)
# Does not divide by 2, 3 or 4.
UNEVEN = {"vocab_size": 97}
Write = Callable[..., checkpoints.Checkpoint]


def logits(folder: Path, group: ParallelGroup) -> torch.Tensor:
    """[T, vocab]: a long step and single ones."""
    return ModelBench(folder, group=group).run(TOKENS, [5, 1])


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


def check_ranks(folder: Path, *sizes: int) -> None:
    """Every rank has the whole logits, and all have the same bits."""
    expected = logits(folder, SINGLE)
    assert expected.std() > 0.01
    for size in sizes:
        first, *others = run_ranks(size, lambda group: logits(folder, group))
        assert_close(first, expected)
        assert all(torch.equal(first, other) for other in others)


FAMILIES: dict[str, tuple[Write, dict[str, Any]]] = {
    "llama": (checkpoints.llama, {"attention_bias": True, "mlp_bias": True}),
    "qwen3": (checkpoints.qwen3, {}),
    "deepseek v2": (checkpoints.deepseek_v2, {"q_lora_rank": None}),
    "deepseek v3": (checkpoints.deepseek_v3, {}),
    "kimi k2.5": (checkpoints.kimi_k25, {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name: str, tmp_path: Path) -> None:
    """On four ranks Llama and Qwen3 have more ranks than KV heads."""
    write, fields = FAMILIES[name]
    check_ranks(write(tmp_path, **UNEVEN, **fields).folder, 2, 4)


def test_a_tied_head_on_three_ranks(tmp_path: Path) -> None:
    fields = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 66}
    folder = checkpoints.llama(tmp_path, tie_word_embeddings=True, **UNEVEN, **fields).folder
    check_ranks(folder, 3)


def test_heads_of_keys_are_repeated(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path).folder
    benches = run_ranks(4, lambda group: ModelBench(folder, group=group))
    layers = [m for bench in benches for m in bench.model.modules() if isinstance(m, Attention)]
    assert {(layer.num_heads, layer.num_kv_heads) for layer in layers} == {(1, 1)}


def without_gates(pack: Pack) -> Pack:
    return lambda module, out, columns: (
        None if module.endswith((".gate", "lm_head")) else pack(module, out, columns)
    )


WIDE = {"hidden_size": 64, "intermediate_size": 128}
WIDE_MOE = {**WIDE, "moe_intermediate_size": 128, "v_head_dim": 32, "num_hidden_layers": 2}
QUANTISED: dict[str, tuple[Write, dict[str, Any], dict[str, Any], Pack]] = {
    "llama awq": (checkpoints.llama, WIDE, test_awq.CONFIG, test_awq.pack_model),
    "qwen3 int8": (checkpoints.qwen3, WIDE, *FORMATS["int8"]),
    "deepseek v3 fp8 blocks": (
        checkpoints.deepseek_v3,
        WIDE_MOE,
        FORMATS["fp8 block"][0],
        without_gates(FORMATS["fp8 block"][1]),
    ),
    "kimi int4 experts": (
        checkpoints.kimi_k25,
        WIDE_MOE,
        {**FORMATS["int4"][0], "ignore": KIMI_IGNORES},
        of_experts(FORMATS["int4"][1]),
    ),
}


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.usefixtures("exact_activations")
def test_quantised_logits(name: str, tmp_path: Path) -> None:
    write, fields, config, pack = QUANTISED[name]
    plain = write(tmp_path / "plain", **fields).folder
    check_ranks(quantised(plain, config, pack)[0], 2, 4)


@pytest.mark.parametrize("write", [checkpoints.llama, checkpoints.deepseek_v3])
def test_hidden_states_between_layers(write: Write, tmp_path: Path) -> None:
    """They are whole on every rank, although layers pass on parts of sums."""
    folder = write(tmp_path).folder

    def states(group: ParallelGroup) -> torch.Tensor:
        bench = ModelBench(folder, group=group)
        bench.model.set_aux_layer_ids((0, 1, 3))
        bench.run(TOKENS, [len(TOKENS)])
        assert bench.output is not None
        return torch.stack((bench.output.hidden_states, *bench.output.aux_hidden_states))

    expected = states(SINGLE)
    for got in run_ranks(2, states):
        assert_close(got, expected)


@pytest.mark.parametrize(
    ("write", "fields", "ranks", "message"),
    [
        (checkpoints.llama, {}, 3, "num_attention_heads=4 does not split over 3 ranks"),
        (checkpoints.llama, {"intermediate_size": 65}, 2, "gate_proj=65 does not split"),
        (
            checkpoints.qwen3,
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            2,
            "num_key_value_heads=3 does not split over 2 ranks",
        ),
        (checkpoints.llama, {"vocab_size": 5}, 4, "vocab_size=5 does not split over 4 ranks"),
    ],
)
def test_what_does_not_split(
    write: Write, fields: dict[str, Any], ranks: int, message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, **fields).folder
    with pytest.raises(ConfigError, match=message):
        ModelBench(folder, group=ParallelGroup(ranks - 1, ranks))


def test_a_group_that_would_be_cut_is_refused_by_name(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    plain = checkpoints.llama(tmp_path / "plain", **WIDE, **heads).folder
    folder = quantised(plain, test_awq.CONFIG, test_awq.pack_model)[0]
    with pytest.raises(
        ConfigError, match=r"model\.layers\.0\.self_attn\.o_proj: q.* groups of 16 inputs"
    ):
        ModelBench(folder, group=ParallelGroup(0, 8))
