"""Plans: sizes are those of the model that is served, and the arithmetic is what the text says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import checkpoints
from models.families import write_family
from models.harness import load_model

from atom.config import ModelOptions
from atom.kv_cache.builders import attention_layers
from atom.kv_cache.paged import PagedCache
from atom.model_loader.source import resolve_model
from atom.plan.cli import main
from atom.plan.gpus import find_gpu
from atom.plan.layouts import Costs, Load, expected_visited, plan_layouts
from atom.plan.sizes import RankSizes, rank_sizes

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MI355X = find_gpu("mi355x")


def sizes_of(folder: Path, ranks: int) -> RankSizes:
    source = resolve_model(ModelOptions(model=str(folder), load_format="dummy"))
    dtype = torch.float32
    return rank_sizes(source, dtype, dtype, ranks)


@pytest.mark.parametrize("family", [checkpoints.llama, checkpoints.kimi_k25])
def test_one_rank_is_the_model_that_is_served(tmp_path: Path, family: object) -> None:
    assert callable(family)
    folder = family(tmp_path / "model").folder
    model = load_model(folder, max_model_len=32)
    sizes = sizes_of(folder, 1)
    assert sizes.weights == sum(parameter.nbytes for parameter in model.parameters())
    cache = PagedCache(attention_layers(model), 4, torch.float32, torch.device("cpu"))
    assert 4 * sizes.cached_token == cache.compute_block_bytes()


def test_keys_of_indexers_are_part_of_a_token(tmp_path: Path) -> None:
    folder = write_family("glm_moe_dsa", tmp_path).folder
    # Three layers of latents, and two with keys; every rank has all.
    assert sizes_of(folder, 1).cached_token == sizes_of(folder, 2).cached_token
    assert sizes_of(folder, 1).cached_token == 4 * (3 * (32 + 8) + 2 * 16)


def test_ranks_split_what_layers_split(tmp_path: Path) -> None:
    folder = checkpoints.kimi_k25(tmp_path / "model").folder
    one, two = sizes_of(folder, 1), sizes_of(folder, 2)
    assert two.expert * 2 == one.expert
    assert two.embedding * 2 == one.embedding
    assert one.rest / 2 < two.rest < one.rest  # norms, routers and latent projections are whole
    assert two.cached_token == one.cached_token  # every rank keeps the latents


def test_a_quantised_checkpoint_is_counted_as_stored(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "model", hidden_size=256, intermediate_size=512).folder
    plain = sizes_of(folder, 1)
    checkpoints.edit_config(folder, quantization_config=BLOCKS)
    head = 4 * 96 * 256
    assert (plain.rest - head) / 4.1 < sizes_of(folder, 1).rest - head < (plain.rest - head) / 3.9


def sizes(**changes: int) -> RankSizes:
    fields = {
        "embedding": 10**9,
        "expert": 10**9,
        "num_experts": 16,
        "encoder": 0,
        "top_k": 4,
        "rest": 8 * 10**9,
        "cached_token": 1000,
        "num_layers": 50,
        "hidden_size": 1024,
        "vocab_size": 1000,
    }
    return RankSizes(**{**fields, **changes})


def test_the_arithmetic_of_a_step() -> None:
    load = Load(context=1000, concurrency=1)
    costs = Costs(efficiency=0.5, collective=1e-5)
    split = sizes(rest=4 * 10**9, expert=5 * 10**8, embedding=5 * 10**8)
    plans = plan_layouts({1: sizes(), 2: split}.__getitem__, 2, MI355X, load, costs)
    tensor, mixed, data = plans
    assert [plan.name for plan in plans] == ["TP2", "TP2 EP2", "DP2 EP2"]
    # One row visits 4 experts of 0.5 GB, beside 4 GB of other weights and 1 MB of KV cache.
    assert tensor.read == 4 * 10**9 + 4 * 5 * 10**8 + 10**6
    assert tensor.step == pytest.approx(tensor.read / 4e12 + 100 * 1e-5)
    # Whole experts on half of the ranks: as many bytes.
    assert mixed.read == tensor.read
    assert mixed.weights == tensor.weights
    # Ranks that attend apart read all other weights.
    assert data.weights == 10**9 + 8 * 10**9 + 8 * 10**9
    assert data.read > tensor.read
    alone = plan_layouts({1: sizes()}.__getitem__, 1, MI355X, load, costs)
    assert [plan.name for plan in alone] == ["TP1"]
    assert alone[0].step == pytest.approx(alone[0].read / 4e12)


def test_more_rows_visit_more_experts() -> None:
    assert expected_visited(384, 8, 1) == pytest.approx(8)
    assert 250 < expected_visited(384, 8, 64) < 384
    assert expected_visited(0, 0, 9) == 0


def test_a_model_that_does_not_split(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "model").folder
    load, costs = Load(context=16, concurrency=1), Costs(1, 0)
    assert not plan_layouts(lambda ranks: sizes_of(folder, ranks), 3, MI355X, load, costs)


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints.kimi_k25(tmp_path / "model").folder
    (folder / "model.safetensors").unlink()  # the configuration is all that it reads
    args = [str(folder / "config.json"), "--gpu", "mi300x", "--gpus", "1", "2", "--context", "64"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "TP2 EP2" in out
    assert "per mi300x (192.0 GB, 5.30 TB/s)" in out
    assert "arithmetic of" in out
    for wrong, message in (
        (["--gpu", "mi9"], "unknown GPU 'mi9'; known are mi300x"),
        (["--context", "0"], "--context must be at least 1"),
        (["--efficiency", "2"], "must lie between 0 and 1"),
        (["--tokens-per-forward", "3"], "between 1 and the number of drafts and one more, 1"),
    ):
        assert main([*args, *wrong]) == 2
        assert message in capsys.readouterr().err
