"""Packed weights are kept beside a converted file, and only used where they are what was packed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import tiny_model
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from atom.config import ModelOptions
from atom.distributed.parallel_state import ParallelGroup
from atom.model_loader import packed_file, packed_weights
from atom.model_loader.checkpoint import list_tensors
from atom.model_loader.gguf.cache import use
from atom.model_loader.locate import converted_before
from atom.model_loader.packed_file import read_ahead
from atom.model_loader.packed_weights import Prepares, packed_cache
from atom.model_loader.placement import find_targets, place_tensors
from atom.model_loader.source import ModelSource, resolve_model
from atom.model_loader.weights import build_model
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.quant import pack
from atom.model_ops.kernels.native.quant.pack import PackedWeights
from atom.model_ops.layer_context import LayerContext
from atom.models.registry import create_model

REASON = native_build().reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

WriteTiny = Callable[..., Path]


def build(options: ModelOptions) -> tuple[nn.Module, Path]:
    """The engine's own model, and the folder that its weights are from."""
    source = resolve_model(options)
    context = LayerContext.create(torch.bfloat16, 64)
    model = build_model(lambda each: create_model(source.hf_config, each), source, context, options)
    return model, source.path


def packed(model: nn.Module) -> dict[str, Any]:
    """All that packed weights are, and the other parameters."""
    found: dict[str, Any] = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, Prepares) and module.prepared_from():
            for i, weights in enumerate(module.prepared):
                assert isinstance(weights, PackedWeights)
                found |= {
                    f"{name} {i} {of.name}": getattr(weights, of.name) for of in fields(weights)
                }
    return found


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = packed(found), packed(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype, name
            assert torch.equal(ours[name], value), name
        else:
            assert ours[name] == value, name


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "packed" in path.name)


@pytest.fixture
def path(write_tiny: WriteTiny) -> Path:
    model = tiny_model(vocab_size=330, num_hidden_layers=2)
    return write_tiny(model, GGMLQuantizationType.Q4_1)


@pytest.fixture
def never_packs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse(*_: object) -> None:
        raise AssertionError("packed anew")

    return lambda: monkeypatch.setattr(pack, "_pack_codes", refuse)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F32"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_second_start_packs_nothing(
    write_tiny: WriteTiny, never_packs: Callable[[], None], kind: str, tied: bool
) -> None:
    model = tiny_model(vocab_size=330, tie_word_embeddings=tied)
    path = write_tiny(model, GGMLQuantizationType[kind])
    options = ModelOptions(str(path), quantization="int8" if kind == "F32" else "auto")
    first, folder = build(options)
    assert len(files(folder)) == 1
    never_packs()
    second, _ = build(options)
    assert_same(second, first)
    assert len(files(folder)) == 1


def test_experts(tmp_path: Path, never_packs: Callable[[], None]) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    folder = tmp_path / "model"
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    use(folder)
    options = ModelOptions(str(folder), quantization="int8")
    first, _ = build(options)
    assert any("experts 1 codes" in name for name in packed(first))
    never_packs()
    second, _ = build(options)
    assert_same(second, first)


def test_folders_that_others_may_change_have_none(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    _, folder = build(ModelOptions(str(tmp_path / "model"), quantization="int8"))
    assert files(folder) == []


def cache_path(source: ModelSource, group: ParallelGroup | None = None, **options: Any) -> Path:
    """Where the weights would be packed."""
    context = LayerContext.create(torch.bfloat16, 64)
    context = replace(context, quant=source.quantization, **options)
    if group is not None:
        context = replace(context, group=group)
    model = create_model(source.hf_config, context)
    tensors = list_tensors(source.path)
    placements = place_tensors(tensors, model.weight_mapping, find_targets(model), source.path)
    cache = packed_cache(source.path, model, placements)
    assert cache is not None
    return cache.path


def test_names_say_what_weights_depend_on(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve_model(ModelOptions(str(path)))
    first = cache_path(source)
    assert cache_path(source) == first
    others = {
        cache_path(source, activations="int8"),
        cache_path(source, activations="float"),
        cache_path(source, ParallelGroup(0, 2)),
        cache_path(source, ParallelGroup(1, 2)),
    }
    changed = tmp_path / "model_ops"
    shutil.copytree(packed_weights._MODEL_OPS, changed, ignore=shutil.ignore_patterns("csrc"))
    (changed / "kernels/native/quant/pack.py").open("a").write("# changed\n")
    monkeypatch.setattr(packed_weights, "_MODEL_OPS", changed)
    others.add(cache_path(source))
    monkeypatch.undo()
    library = native_build().library
    assert library is not None
    monkeypatch.setattr(library, "_name", f"{library._name}2")
    others.add(cache_path(source))
    assert len(others | {first}) == 7


def test_two_settings_keep_theirs_and_a_third_takes_the_oldest(path: Path) -> None:
    kept = []
    for activations in ("auto", "int8", "float"):
        _, folder = build(ModelOptions(str(path), activations=activations))
        (new,) = set(files(folder)) - set(kept)
        os.utime(folder / new, (len(kept), len(kept)))
        kept.append(new)
    assert files(folder) == sorted(kept[1:])


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: damage(path, 45),
        lambda path: damage(path, 8),
        lambda path: damage(path, 2 << 20),
        lambda path: damage(path, -1),
        lambda path: os.truncate(path, path.stat().st_size - 64),
        lambda path: os.truncate(path, 0),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
    ids=["header", "digest", "first", "last", "shorter", "empty", "zeros"],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_damaged_file_is_made_anew(
    path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], object], ahead: bool
) -> None:
    options = ModelOptions(str(path))
    first, folder = build(options)
    (name,) = files(folder)
    good = (folder / name).read_bytes()
    spoil(folder / name)
    if ahead:
        read_ahead(folder / name, 1)
    second, _ = build(options)
    assert f"{name} is not used, and made anew" in caplog.text
    assert_same(second, first)
    assert (folder / name).read_bytes() == good


def test_bytes_that_change_places_are_found(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ModelOptions(str(path))
    _, folder = build(options)
    (name,) = files(folder)
    values = bytearray((folder / name).read_bytes())
    start = 2 << 20
    values[start : start + 512], values[start + 512 : start + 1024] = (
        values[start + 512 : start + 1024],
        values[start : start + 512],
    )
    (folder / name).write_bytes(values)
    build(options)
    assert "its bytes are not those that were written" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_keeps_nothing(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    options = ModelOptions(str(path))
    resolve_model(options)

    def fails(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(packed_weights.os, "pwritev", fails)
        first, folder = build(options)
    assert f"packed weights are not kept: [Errno {number}]" in caplog.text
    assert files(folder) == []
    second, _ = build(options)
    assert_same(second, first)
    assert len(files(folder)) == 1


def test_without_room_nothing_is_written(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "atom")
    options = ModelOptions(str(path))
    resolve_model(options)
    with monkeypatch.context() as patch:
        patch.setenv("ATOM_CACHE_LIMIT", "1MB")
        _, folder = build(options)
        assert files(folder) == []
    usage = shutil.disk_usage(folder)._replace(free=1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(packed_weights.shutil, "disk_usage", lambda _: usage)
        build(options)
    assert files(folder) == []
    assert caplog.text.count("packed weights are not kept: no room") == 2


@pytest.mark.parametrize("is_huge", [True, False])
def test_a_file_in_small_pages_is_copied(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_huge: bool
) -> None:
    options = ModelOptions(str(path))
    first, folder = build(options)
    monkeypatch.setattr(packed_file, "_is_in_huge_pages", lambda _: is_huge)
    second, _ = build(options)
    assert_same(second, first)
    codes = [value.data_ptr() for name, value in packed(second).items() if name.endswith("codes")]
    assert {is_mapped_from(folder, address) for address in codes} == {is_huge}


def is_mapped_from(folder: Path, address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return str(folder) in line
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_what_is_read_ahead_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ModelOptions(str(path))
    assert converted_before(options) is None
    first, folder = build(options)
    (name,) = files(folder)
    assert converted_before(options) == folder
    assert converted_before(ModelOptions(str(folder))) is None
    assert converted_before(ModelOptions(str(path), load_format="dummy")) is None
    opened = []
    read_header = packed_file._read_header
    monkeypatch.setattr(
        packed_file, "_read_header", lambda file: opened.append(file) or read_header(file)
    )
    read_ahead(folder / name, 1)
    second, _ = build(options)
    assert len(opened) == 1
    assert_same(second, first)
    build(options)
    assert len(opened) == 2


def test_what_nobody_asks_for_is_given_back(path: Path) -> None:
    options = ModelOptions(str(path))
    _, folder = build(options)
    (name,) = files(folder)
    of_other_kernels = shutil.copy(folder / name, folder / f"{'0' * 16}.packed")
    read_ahead(of_other_kernels, 1)
    assert packed_file._ahead
    build(options)
    assert not packed_file._ahead


def test_engines_that_start_at_once(path: Path) -> None:
    options = ModelOptions(str(path))
    source = resolve_model(options)
    results: list[nn.Module] = []
    for left in range(2):
        threads = [
            threading.Thread(target=lambda: results.append(build(options)[0])) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(files(source.path)) == 1, left
    assert len(results) == 8
    for other in results[1:]:
        assert_same(other, results[0])


def test_what_killed_processes_left_goes_and_what_live_ones_write_stays(path: Path) -> None:
    source = resolve_model(ModelOptions(str(path)))
    dead, live = (source.path / f".0.packed.tmp-{name}" for name in ("dead", "live"))
    dead.write_bytes(b"")
    program = "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, fcntl.LOCK_EX); "
    program += "print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(live)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        build(ModelOptions(str(path)))
        assert not dead.exists()
        assert live.exists()
        writer.kill()
