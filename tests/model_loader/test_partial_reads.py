"""A rank reads its part of each tensor, and a layer is converted once it is complete."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from atom.config import ModelOptions
from atom.distributed.parallel_state import ParallelGroup
from atom.model_loader.checkpoint import list_tensors
from atom.model_loader.errors import WeightError
from atom.model_loader.layers import LayerQueue
from atom.model_loader.placement import find_targets, place_tensors
from atom.model_loader.safetensors.reader import CheckpointTensor, WeightFile
from atom.model_loader.source import ModelSource
from atom.model_loader.weights import load_weights
from atom.model_ops.embedding import ParallelLMHead, VocabParallelEmbedding
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from atom.model_ops.moe import FusedMoE
from atom.model_ops.quant.formats.table import parse_quantization
from atom.model_ops.weight_mapping import WeightMapping
from atom.platform import cpu_platform

RANKS = 8
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class FileTensor(torch.Tensor):
    """A tensor of a file that counts what is read of it; views of it count as well."""

    num_bytes = 0
    lock = threading.Lock()

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        if isinstance(result, tuple) and all(isinstance(part, torch.Tensor) for part in result):
            return tuple(part.as_subclass(FileTensor) for part in result)  # chunks
        if not isinstance(result, torch.Tensor):
            return result
        files = [arg for arg in args if isinstance(arg, FileTensor)]
        storages = {file.untyped_storage().data_ptr() for file in files}
        if result.untyped_storage().data_ptr() in storages:
            return result.as_subclass(FileTensor)
        with cls.lock:
            FileTensor.num_bytes += sum(file.nbytes for file in files)
        return result.as_subclass(torch.Tensor)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[FileTensor]:
    original = WeightFile.map

    def counting(file: WeightFile, tensors: Sequence[CheckpointTensor]) -> list[torch.Tensor]:
        return [values.as_subclass(FileTensor) for values in original(file, tensors)]

    monkeypatch.setattr(WeightFile, "map", counting)
    monkeypatch.setattr(FileTensor, "num_bytes", 0)
    return FileTensor


def context(rank: int = 0, size: int = 1, **quantization: object) -> LayerContext:
    created = LayerContext.create(torch.float32, 8, cpu_platform())
    if quantization:
        created = replace(created, quant=parse_quantization(quantization, {}))
    return replace(created, group=ParallelGroup(rank, size))


def save(folder: Path, **tensors: torch.Tensor) -> None:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")


def load(folder: Path, module: nn.Module) -> nn.Module:
    source = ModelSource(folder, "by hand", None, frozenset(), torch.float32)  # type: ignore[arg-type]
    load_weights(module, WeightMapping(packed=PACKED), source, ModelOptions())
    return module


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


CUTS: dict[str, tuple[dict[str, tuple[int, ...]], Callable[[LayerContext], nn.Module]]] = {
    "column": ({"weight": (64, 8)}, lambda c: ColumnParallelLinear(8, 64, False, c, "a")),
    "row": ({"weight": (8, 64)}, lambda c: RowParallelLinear(64, 8, False, c, "a")),
    "merged": (
        {"gate_proj__weight": (32, 8), "up_proj__weight": (64, 8)},
        lambda c: MergedColumnParallelLinear(8, {"gate_proj": 32, "up_proj": 64}, False, c, "a"),
    ),
    "qkv": (
        {"q_proj__weight": (64, 8), "k_proj__weight": (32, 8), "v_proj__weight": (32, 8)},
        lambda c: QKVParallelLinear(8, 4, 16, 8, False, c, "a"),
    ),
    "experts": (
        {
            f"{i}__{name}__weight": (8, 16) if name == "down_proj" else (16, 8)
            for i in range(2)
            for name in ("gate_proj", "up_proj", "down_proj")
        },
        lambda c: FusedMoE(2, 2, 8, 16, c, "a"),
    ),
    "stacked experts": (
        {"gate_up_proj": (2, 32, 8), "down_proj": (2, 8, 16)},
        lambda c: FusedMoE(2, 2, 8, 16, c, "a"),
    ),
    "embedding": ({"weight": (64, 8)}, lambda c: VocabParallelEmbedding(64, 8, c, "embedding")),
    "head": ({"weight": (64, 8)}, lambda c: ParallelLMHead(64, 8, c, "a")),
}
NAMES = {"merged": "gate_up_proj", "qkv": "qkv_proj"}


@pytest.mark.parametrize("kind", CUTS)
def test_ranks_read_their_part(tmp_path: Path, kind: str, counted: type[FileTensor]) -> None:
    """Together they read each byte once, and have the parts of the whole."""
    shapes, create = CUTS[kind]
    prefix = "" if kind in NAMES else "a__"
    save(tmp_path, **{prefix + name: random(*shape) for name, shape in shapes.items()})
    num_bytes = sum(tensor.num_bytes for tensor in list_tensors(tmp_path))
    name = NAMES.get(kind, "a")
    whole = load(tmp_path, nn.ModuleDict({name: create(context())}))
    assert counted.num_bytes == num_bytes
    parts = []
    for rank in range(RANKS):
        counted.num_bytes = 0
        parts.append(load(tmp_path, nn.ModuleDict({name: create(context(rank, RANKS))})))
        assert counted.num_bytes == num_bytes / RANKS
    for key, expected in whole.state_dict().items():
        values = torch.cat([part.state_dict()[key].flatten() for part in parts])
        assert torch.equal(values.sort().values, expected.flatten().sort().values)


@pytest.mark.parametrize("kind", ["experts", "stacked experts"])
def test_ranks_read_the_experts_that_they_hold(
    tmp_path: Path, kind: str, counted: type[FileTensor]
) -> None:
    """Whole ones; the others' tensors are known, and not read."""
    shapes, create = CUTS[kind]
    save(tmp_path, **{f"a__{name}": random(*shape) for name, shape in shapes.items()})
    num_bytes = sum(tensor.num_bytes for tensor in list_tensors(tmp_path))
    whole = load(tmp_path, nn.ModuleDict({"a": create(context())}))["a"]
    for rank in range(2):
        counted.num_bytes = 0
        ranks = ParallelGroup(rank, 2)
        layer = create(replace(context(rank, 2), experts=ranks))
        load(tmp_path, nn.ModuleDict({"a": layer}))
        assert counted.num_bytes == num_bytes / 2
        assert torch.equal(layer.w13_weight, whole.w13_weight[rank : rank + 1])
        assert torch.equal(layer.w2_weight, whole.w2_weight[rank : rank + 1])


def test_every_rank_misses_an_expert(tmp_path: Path) -> None:
    shapes, create = CUTS["experts"]
    tensors = {f"a__{name}": random(*shape) for name, shape in shapes.items()}
    del tensors["a__1__up_proj__weight"]
    save(tmp_path, **tensors)
    for rank in range(2):
        layer = create(replace(context(), experts=ParallelGroup(rank, 2)))
        with pytest.raises(WeightError, match=r"lacks 1\.up_proj"):
            load(tmp_path, nn.ModuleDict({"a": layer}))


def test_scales_and_codes_are_read_in_part(tmp_path: Path, counted: type[FileTensor]) -> None:
    codes = random(256 * RANKS, 128).to(torch.float8_e4m3fn)
    save(tmp_path, a__weight=codes, a__weight_scale_inv=torch.ones(2 * RANKS, 1))
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    layer = ColumnParallelLinear(128, 256 * RANKS, False, context(3, RANKS, **quantization), "a")
    loaded = load(tmp_path, nn.ModuleDict({"a": layer}))["a"]
    assert counted.num_bytes == 256 * 128 + 2 * 4
    assert torch.equal(loaded(torch.eye(128)).T, codes[3 * 256 : 4 * 256].float())


def test_only_the_first_rank_adds_the_bias(tmp_path: Path) -> None:
    save(tmp_path, a__weight=random(8, 16), a__bias=random(8))
    x, total = random(3, 16), torch.zeros(3, 8)
    for rank in range(2):
        layer = RowParallelLinear(16, 8, True, context(rank, 2), "a")
        load(tmp_path, nn.ModuleDict({"a": layer}))
        total += layer(x[:, 8 * rank : 8 * rank + 8])
    torch.testing.assert_close(total, x @ random(8, 16).T + random(8))


def test_a_layer_is_converted_when_it_is_complete(tmp_path: Path) -> None:
    """The memory of its stored form is free before the next layer is read."""
    quantization = {"quant_method": "fp8"}
    codes = torch.ones(16, 16).to(torch.float8_e4m3fn)
    names = {f"{layer}__weight": codes.clone() for layer in "ab"}
    scales = {f"{layer}__weight_scale": torch.tensor(2.0) for layer in "ab"}
    save(tmp_path, **names, **scales)
    layers = {name: ReplicatedLinear(16, 16, False, context(**quantization), name) for name in "ab"}
    model = nn.ModuleDict(layers)
    placements = place_tensors(
        list_tensors(tmp_path), WeightMapping(), find_targets(model), tmp_path
    )
    queue = LayerQueue(model, placements)
    weight = weakref.ref(layers["a"].weight)
    waiting = [p for p in placements if p.tensor.name.startswith("a.")]
    for placement in waiting:
        assert queue.convert_loaded() == []
        assert weight() is not None
        placement.copy(torch.ones(placement.tensor.shape, dtype=placement.target.dtype))
        assert queue.loaded(placement) == []
    assert queue.convert_loaded() == []
    assert weight() is None
    assert hasattr(layers["b"], "weight")
    assert torch.equal(layers["a"](torch.eye(16)), torch.ones(16, 16))
