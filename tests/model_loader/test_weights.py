"""Filling real models from checkpoints that transformers wrote, and refusing wrong ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_files import tiny_model
from safetensors.torch import load_file, save_file
from torch import nn

from atom.config import ModelOptions
from atom.model_loader import layers as layers_module
from atom.model_loader import weights as weights_module
from atom.model_loader.checkpoint import list_tensors
from atom.model_loader.layers import LayerQueue
from atom.model_loader.placement import Placement, Target
from atom.model_loader.source import ModelSource, resolve_model
from atom.model_loader.weights import WeightError, load_weights
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.registry import create_model

Weights = dict[str, torch.Tensor]


def save(folder: Path, model: nn.Module, **options: object) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def fill(folder: Path, dtype: torch.dtype = torch.float32, **options: str) -> nn.Module:
    """The engine's own model with the folder's weights."""
    model_options = ModelOptions(model=str(folder), **options)
    source = resolve_model(model_options)
    model = create_model(source.hf_config, LayerContext.create(dtype, 64))
    for parameter in model.parameters():  # what is not loaded shows
        parameter.data.fill_(float("nan"))
    load_weights(model, model.weight_mapping, source, model_options)
    return model


def rewrite(folder: Path, change: Callable[[Weights], object]) -> Path:
    """Change the tensors of a folder with a single file."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return folder


def assert_equal_weights(model: nn.Module, expected: Weights, dtype: torch.dtype) -> None:
    ours = dict(model.named_parameters())
    for i in range(2):
        layer = f"model.layers.{i}"
        for fused, parts in {
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        }.items():
            stacked = torch.cat([expected.pop(f"{layer}.{part}.weight") for part in parts])
            assert torch.equal(ours.pop(f"{layer}.{fused}.weight"), stacked.to(dtype))
    for name, parameter in ours.items():
        assert torch.equal(parameter, expected.pop(name).to(dtype)), name
    assert set(expected) <= {"lm_head.weight"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "model", tiny_model())


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", ["lazy", "prefetch"])
def test_every_weight_arrives(tmp_path: Path, architecture: str, tied: bool, strategy: str) -> None:
    model = tiny_model(architecture, tie_word_embeddings=tied)
    folder = save(tmp_path, model)
    ours = fill(folder, safetensors_load_strategy=strategy)
    assert_equal_weights(ours, dict(model.state_dict()), torch.float32)


@pytest.mark.parametrize("strategy", ["lazy", "prefetch"])
def test_sharded_folders(tmp_path: Path, strategy: str) -> None:
    model = tiny_model()
    folder = save(tmp_path, model, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ours = fill(folder, safetensors_load_strategy=strategy)
    assert_equal_weights(ours, dict(model.state_dict()), torch.float32)


def test_shards_without_an_index_and_consolidated_duplicates(tmp_path: Path) -> None:
    model = tiny_model()
    folder = save(tmp_path, model, max_shard_size="100KB")
    (folder / "model.safetensors.index.json").unlink()
    save_file({"tok_embeddings.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    assert_equal_weights(fill(folder), dict(model.state_dict()), torch.float32)
    for path in folder.glob("model-*"):
        path.unlink()
    assert [t.name for t in list_tensors(folder)] == ["tok_embeddings.weight"]


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32])
def test_conversion_by_value(folder: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    def change(tensors: Weights) -> None:
        tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()})

    rewrite(folder, change)
    expected = load_file(folder / "model.safetensors")
    assert_equal_weights(fill(folder, wanted), expected, wanted)


def test_values_too_large_for_float16_are_named(folder: Path) -> None:
    def change(tensors: Weights) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][1, 2] = 1e6

    rewrite(folder, change)
    with pytest.raises(WeightError, match=r"layers\.0\.mlp\.up_proj\.weight: values up to 1e\+06"):
        fill(folder, torch.float16)
    fill(folder, torch.bfloat16)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
@pytest.mark.parametrize("wanted", [torch.float16, torch.float32])
def test_values_that_are_no_numbers_are_named(
    folder: Path, name: str, value: float, wanted: torch.dtype
) -> None:
    def change(tensors: Weights) -> None:
        tensors[name].flatten()[3:5] = value

    size = load_file(folder / "model.safetensors")[name].numel()
    with pytest.raises(WeightError, match=rf"{name}: 2 of {size} values are NaN or infinite"):
        fill(rewrite(folder, change), wanted)


def test_large_values_that_add_up_to_infinity_are_loaded(folder: Path) -> None:
    def change(tensors: Weights) -> None:
        tensors.update({name: tensor.half() for name, tensor in tensors.items()})
        tensors["model.norm.weight"][:] = 6e4

    assert fill(rewrite(folder, change), torch.float16).model.norm.weight.max() == 6e4


def test_missing_tensors_are_named(folder: Path) -> None:
    def change(tensors: Weights) -> None:
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.self_attn.v_proj.weight"]

    with pytest.raises(WeightError) as error:
        fill(rewrite(folder, change))
    assert "missing tensors (2)" in str(error.value)
    assert "model.norm.weight" in str(error.value)
    assert "model.layers.1.self_attn.qkv_proj.weight (lacks v_proj)" in str(error.value)


def test_unexpected_tensors_are_named_and_counted(folder: Path) -> None:
    def change(tensors: Weights) -> None:
        tensors.update({f"extra.{i:02}.weight": torch.ones(1) for i in range(15)})

    with pytest.raises(WeightError) as error:
        fill(rewrite(folder, change))
    assert "unexpected tensors (15): extra.00.weight" in str(error.value)
    assert "extra.09.weight and 5 more" in str(error.value)
    assert "extra.10" not in str(error.value)


def test_wrong_shapes_are_named(folder: Path) -> None:
    def change(tensors: Weights) -> None:
        tensors["model.embed_tokens.weight"] = torch.zeros(95, 64)
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(16, 64)
        tensors["model.layers.1.input_layernorm.weight"] = torch.zeros(63)

    with pytest.raises(WeightError) as error:
        fill(rewrite(folder, change))
    for part in ["wrong tensors (3)", "embed_tokens", "[95, 64]", "[96, 64]", "k_proj", "16", "63"]:
        assert part in str(error.value)


def test_types_without_plain_values_are_named(folder: Path) -> None:
    def change(tensors: Weights) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    with pytest.raises(WeightError, match=r"up_proj\.weight is stored as F8_E4M3"):
        fill(rewrite(folder, change))


def test_ignored_tensors(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    folder = save(tmp_path, model)

    def change(tensors: Weights) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    assert_equal_weights(fill(rewrite(folder, change)), dict(model.state_dict()), torch.float32)


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    folder = save(tmp_path, tiny_model(), max_shard_size="100KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())

    path.write_text(
        json.dumps(index | {"weight_map": index["weight_map"] | {"x": "gone.safetensors"}})
    )
    with pytest.raises(WeightError, match=r"not there: gone\.safetensors"):
        fill(folder)

    first = sorted(set(index["weight_map"].values()))[0]
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {"y.weight": first}}))
    with pytest.raises(WeightError, match=r"tensors that are not in their files: y\.weight"):
        fill(folder)

    path.write_text(json.dumps(index | {"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(WeightError, match="names files elsewhere"):
        fill(folder)

    path.write_text("[]")
    with pytest.raises(WeightError, match="is no index"):
        fill(folder)


def test_the_same_tensor_in_two_files(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, folder / "more.safetensors")
    with pytest.raises(WeightError, match=r"occur in several files: model\.norm\.weight"):
        fill(folder)


def test_damaged_files_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for damaged in [b"", content[:5], content[:200], content[:-1], b"\xff" * 500]:
        path.write_bytes(damaged)
        with pytest.raises(WeightError, match=r"model\.safetensors is damaged or incomplete"):
            fill(folder)


def test_small_groups_and_many_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_GROUP_BYTES", 1)
    monkeypatch.setattr(weights_module, "default_num_threads", lambda: 8)
    threads = torch.get_num_threads()
    expected = load_file(folder / "model.safetensors")
    assert_equal_weights(fill(folder), expected, torch.float32)
    assert torch.get_num_threads() == threads


class Converted(nn.Module):
    """A layer that notes which thread converts it."""

    dequantised_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.thread: threading.Thread | None = None

    def process_after_loading(self) -> None:
        self.thread = threading.current_thread()


@pytest.mark.parametrize("is_large", [False, True])
def test_small_layers_are_converted_by_the_thread_that_loaded_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr(layers_module, "_WORTH_THREADS", 64)
    layer = Converted()
    save_file({"weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    [tensor] = list_tensors(tmp_path)
    placement = Placement(tensor, Target(layer, "weight", torch.float32, None, False), None)
    queue = LayerQueue(layer, [placement])
    loading = threading.Thread(target=queue.loaded, args=(placement,))
    loading.start()
    loading.join()
    assert layer.thread is (None if is_large else loading)
    assert queue.convert_loaded() == []
    assert layer.thread is (threading.current_thread() if is_large else loading)


def test_dummy_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first, second = fill(folder, load_format="dummy"), fill(folder, load_format="dummy")
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.isfinite().all()
        assert a.std() > 0
        assert (a - (1 if a.dim() == 1 else 0)).abs().max() <= 0.021
    assert fill(folder, torch.bfloat16, load_format="dummy").model.norm.weight.isfinite().all()


class Experts(nn.Module):
    """Stands for a module that names its tensors itself: two experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.zeros(2, 3))

    def place_weight(self, name: str) -> tuple[str, str | None] | None:
        if name == "all":
            return "stacked", None
        return ("stacked", name[0]) if name in ("0.weight", "1.weight") else None

    def weight_shards(self, name: str) -> tuple[str, ...]:
        assert name == "stacked"
        return ("0", "1")

    def covers(self, name: str, shard: str) -> tuple[str, ...]:
        return (shard,)

    def holds(self, shard: str) -> bool:
        return True

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        assert name == "stacked"
        target = self.stacked.data if shard is None else self.stacked.data[int(shard)]
        target.copy_(tensor)


def fill_by_hand(
    tmp_path: Path, model: nn.Module, tensors: Weights, mapping: WeightMapping | None = None
) -> nn.Module:
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(own, tmp_path / "model.safetensors")
    source = ModelSource(tmp_path, "by hand", None, frozenset(), torch.float32)  # type: ignore[arg-type]
    load_weights(model, mapping or WeightMapping(), source, ModelOptions())
    return model


def test_modules_that_name_their_tensors(tmp_path: Path) -> None:
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Experts()})})
    one, two = torch.ones(3), torch.full((3,), 2.0)
    parts = {"mlp.experts.0.weight": one, "mlp.experts.1.weight": two}
    filled = fill_by_hand(tmp_path, model, parts)
    assert torch.equal(filled["mlp"]["experts"].stacked, torch.stack([one, two]))
    both = {"mlp.experts.all": torch.stack([two, one])}
    assert torch.equal(fill_by_hand(tmp_path, model, both)["mlp"]["experts"].stacked[0], two)
    with pytest.raises(WeightError, match=r"mlp\.experts\.stacked \(lacks 1\)"):
        fill_by_hand(tmp_path, model, {"mlp.experts.0.weight": one})
    with pytest.raises(WeightError, match=r"unexpected tensors \(1\): mlp\.experts\.2\.weight"):
        fill_by_hand(tmp_path, model, parts | {"mlp.experts.2.weight": one})
    with pytest.raises(WeightError, match="given twice"):
        fill_by_hand(tmp_path, model, parts | both)


def test_plain_modules_renames_and_shared_parameters(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    mapping = WeightMapping(renames=(("old.", ""), ("older.", "")), ignored=(r"skip\..*",))
    tensors = {
        "old.a.weight": torch.eye(2),
        "older.a.bias": torch.ones(2, dtype=torch.float16),
        "skip.me": torch.ones(1),
    }
    fill_by_hand(tmp_path, model, tensors, mapping)
    assert torch.equal(model["b"].weight, torch.eye(2))
    assert torch.equal(model["a"].bias, torch.ones(2))
    with pytest.raises(WeightError, match=r"old\.a\.weight: .*\[3, 3\].*\[2, 2\]"):
        fill_by_hand(tmp_path, model, tensors | {"old.a.weight": torch.eye(3)}, mapping)
    packed = WeightMapping(packed={"a": ("x", "y")})
    tensors = {"x.weight": torch.eye(2), "y.weight": torch.eye(2), "a.bias": torch.ones(2)}
    with pytest.raises(WeightError, match="Linear cannot take x as a part of its weight"):
        fill_by_hand(tmp_path, model, tensors, packed)


def test_models_without_memory_are_refused(folder: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    source = resolve_model(ModelOptions(model=str(folder)))
    with pytest.raises(ValueError, match=r"meta device.*weight, bias"):
        load_weights(model, WeightMapping(), source, ModelOptions())


_MEASURE = """
import sys
from pathlib import Path
import torch
from transformers import LlamaConfig
from atom.config import ModelOptions
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import load_weights
from atom.model_ops.layer_context import LayerContext
from atom.models.registry import create_model

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

options = ModelOptions(safetensors_load_strategy=sys.argv[1], quantization="none")
before = status("VmRSS")
source = resolve_model(options)
model = create_model(source.hf_config, LayerContext.create(torch.bfloat16, 2048))
load_weights(model, model.weight_mapping, source, options)
print(status("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("embedded_source")
@pytest.mark.parametrize("strategy", ["lazy", pytest.param("prefetch", marks=pytest.mark.slow)])
def test_peak_memory(embedded_cache: Path, strategy: str) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "ATOM_CACHE": str(embedded_cache),
    }
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, strategy],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    peak, weights = map(int, done.stdout.split())
    assert weights == 269_030_016
    assert peak <= weights + 250 * 2**20, f"{(peak - weights) / 2**20:.0f} MiB over the weights"
