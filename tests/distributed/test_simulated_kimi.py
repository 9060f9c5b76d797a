"""One rank of eight of Kimi-K2.5, alone: its shapes, and the bytes that it holds and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lone_rank import LoneCollectives, lone_rank
from models import checkpoints
from models.harness import ModelBench
from quantised.compressed import INT4
from quantised.test_compressed_tensors import KIMI_IGNORES
from torch.utils._python_dispatch import TorchDispatchMode

from atom.config import ModelOptions
from atom.model_loader.source import resolve_model
from atom.model_ops.attention.mla import MLAAttention
from atom.model_ops.embedding import VocabParallelEmbedding
from atom.model_ops.moe import FusedMoE
from atom.model_ops.op_table.ops import OPS
from atom.plan.sizes import RankSizes, rank_sizes

RANKS = 8
LAYERS, VOCAB, EXPERTS, TOP_K, INTER = 3, 163, 16, 4, 256
# As in Kimi-K2.5, heads and the intermediate sizes divide by 8; this vocabulary does not.
SHAPE = {
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": INTER,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
}


class Reads(TorchDispatchMode):
    """Records the parts of a model's parameters that kernels get; views only pass them on.

    Attributes:
        parts: (address, bytes) of each.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.parts: set[tuple[int, int]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for tensor in torch.utils._pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._record(tensor)
        return out

    def _record(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().data_ptr() in self._storages:
            self.parts.add((tensor.data_ptr(), tensor.nbytes))


@pytest.fixture
def torch_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what PyTorch computes can be observed."""
    for op in OPS:
        monkeypatch.setenv(f"ATOM_OP_{op.upper()}", "torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.kimi_k25(tmp_path_factory.mktemp("kimi"), **SHAPE).folder
    (folder / "model.safetensors").unlink()
    return folder


def sizes_of(folder: Path) -> RankSizes:
    source = resolve_model(ModelOptions(model=str(folder), load_format="dummy"))
    return rank_sizes(source, *[torch.float32] * 2, RANKS)


def bench_of(folder: Path, rank: int) -> tuple[ModelBench, LoneCollectives]:
    group, collectives = lone_rank(rank, RANKS)
    return ModelBench(folder, group=group, load_format="dummy"), collectives


@pytest.mark.parametrize("rank", [0, 5, 7])
def test_a_step_of_one_rank(rank: int, folder: Path) -> None:
    bench, collectives = bench_of(folder, rank)
    logits = bench.step({"a": [3, 4, 5], "b": [6]})
    assert logits["a"].shape == (3, VOCAB)
    assert logits["a"].isfinite().all()
    # The embedding, and each layer's attention and MLP or experts.
    sums = [("all_reduce", torch.Size((4, 48)))] * (1 + 2 * LAYERS)
    # 7 ranks have 21 tokens, the last has 16.
    assert collectives.calls == [*sums, ("all_gather", torch.Size((4, 21)))]
    attention = [m for m in bench.model.modules() if isinstance(m, MLAAttention)]
    assert [layer.num_heads for layer in attention] == [2] * LAYERS
    assert {layer.stored_parts()["latent"] for layer in attention} == {(32 + 8,)}
    experts = [m for m in bench.model.modules() if isinstance(m, FusedMoE)]
    assert {layer.w13_weight.shape for layer in experts} == {(EXPERTS, 2 * INTER // RANKS, 48)}
    assert {layer.w2_weight.shape for layer in experts} == {(EXPERTS, 48, INTER // RANKS)}


def test_bytes_on_a_rank_are_those_of_the_plan(folder: Path) -> None:
    """The first rank's: the last has fewer tokens of the vocabulary."""
    sizes = sizes_of(folder)
    held = [
        sum(p.nbytes for p in bench_of(folder, rank)[0].model.parameters())
        for rank in (0, RANKS - 1)
    ]
    assert held == [sizes.weights, sizes.weights - 2 * 5 * 48 * 4]


@pytest.mark.usefixtures("torch_ops")
def test_what_a_rank_reads_in_a_step_is_what_the_plan_says(folder: Path) -> None:
    """A token visits `TOP_K` experts of each layer, and reads single rows of the embedding."""
    sizes = sizes_of(folder)
    bench, _ = bench_of(folder, 0)
    [embedding] = [m for m in bench.model.modules() if isinstance(m, VocabParallelEmbedding)]
    bench.step({"a": [3, 4]})
    with Reads(bench.model) as reads:
        bench.step({"a": [5]})
    read = sum(size for start, size in reads.parts if start != embedding.weight.data_ptr())
    assert read == sizes.rest + TOP_K * sizes.expert


def test_int4_experts(folder: Path, tmp_path: Path) -> None:
    """Groups of 32 inputs, of which a rank has one in the second product."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    config = {**INT4, "ignore": KIMI_IGNORES}
    checkpoints.edit_config(tmp_path, quantization_config=config)
    bench, _ = bench_of(tmp_path, 7)
    assert bench.step({"a": [3]})["a"].isfinite().all()
    numbers, codes = sizes_of(folder), sizes_of(tmp_path)
    assert codes.rest == numbers.rest
    # A rank's part of an expert: three matrices of as many numbers, half a byte each, with a scale
    # of 2 bytes for each group. Rows of 48 inputs are two groups.
    rows, columns = INTER // RANKS, 48
    groups = 2 * rows * 2 + columns
    assert codes.expert == (LAYERS - 1) * (3 * rows * columns // 2 + 2 * groups)
