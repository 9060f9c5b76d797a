"""Converted folders against the models that were written, and against transformers."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from gguf_files import tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from atom.config import ConfigError, ModelOptions
from atom.model_loader.errors import WeightError
from atom.model_loader.gguf import convert as gguf_convert
from atom.model_loader.gguf import locks
from atom.model_loader.gguf.convert import converted_folder
from atom.model_loader.gguf.file import read_gguf
from atom.model_loader.source import ModelSource, resolve_model

WriteTiny = Callable[..., Path]
_KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
# Of the types that the `gguf` package reads and cannot write: where a block has its scales.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def convert(path: Path, dtype: torch.dtype = torch.float32) -> Path:
    return converted_folder(read_gguf(path), dtype, with_tokenizer=True)


def reference_values(raw: np.ndarray, kind: str) -> np.ndarray:
    """The values of quantised rows, block by block, by the formulas of ggml's `ggml-quants.c`."""
    sizes = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24}
    out = []
    for block in raw.reshape(-1, sizes[kind]):
        scale = block[:2].copy().view(np.float16)[0].astype(np.float32)
        if kind == "Q8_0":
            out += [scale * q for q in block[2:].view(np.int8).astype(np.float32)]
            continue
        start = 2 if kind.endswith("_0") else 4
        highest = np.zeros(32, np.uint8)
        if kind.startswith("Q5"):
            highest = np.unpackbits(block[start : start + 4], bitorder="little") << 4
            start += 4
        nibbles = [int(b) & 15 for b in block[start:]] + [int(b) >> 4 for b in block[start:]]
        nibbles = [q | int(bit) for q, bit in zip(nibbles, highest, strict=True)]
        if kind.endswith("_0"):
            middle = 8 if kind == "Q4_0" else 16
            out += [scale * np.float32(q - middle) for q in nibbles]
        else:
            least = block[2:4].copy().view(np.float16)[0].astype(np.float32)
            out += [scale * np.float32(q) + least for q in nibbles]
    return np.array(out, np.float32)


def expected_values(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    if tensor.dim() == 1 or kind == "F32":
        return tensor
    if kind in ("F16", "BF16"):
        return tensor.to({"F16": torch.float16, "BF16": torch.bfloat16}[kind]).float()
    raw = quantize(tensor.numpy(), GGMLQuantizationType[kind])
    return torch.from_numpy(reference_values(raw, kind)).reshape(tensor.shape)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", _KINDS)
def test_values_of_every_type(write_tiny: WriteTiny, architecture: str, kind: str) -> None:
    model = tiny_model(architecture)
    path = write_tiny(model, GGMLQuantizationType[kind], changes=_without_tokenizer())
    folder = converted_folder(read_gguf(path), torch.float32, with_tokenizer=False)
    weights = load_file(folder / "model.safetensors")
    expected = model.state_dict()
    assert set(weights) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(weights[name], expected_values(tensor, kind)), name


@pytest.mark.parametrize("kind", _SCALES)
def test_types_of_large_blocks(
    write_tiny: WriteTiny, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[bytes, np.ndarray] = {}
    random = np.random.default_rng(0)

    def random_blocks(values: np.ndarray, stored: GGMLQuantizationType) -> np.ndarray:
        if stored == GGMLQuantizationType.F32:
            return values
        elements, num_bytes = GGML_QUANT_SIZES[stored]
        blocks = random.integers(0, 256, (values.size // elements, num_bytes), np.uint8)
        for start in _SCALES[kind]:
            scale = random.uniform(0.001, 0.1, len(blocks)).astype(np.float16)
            blocks[:, start : start + 2] = scale.view(np.uint8).reshape(-1, 2)
        raw = blocks.reshape(len(values), -1)
        written[values.tobytes()] = dequantize(raw, stored)
        return raw

    monkeypatch.setattr("gguf_files.quantize", random_blocks)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = tiny_model("qwen3", **sizes)
    path = write_tiny(model, GGMLQuantizationType[kind], changes=_without_tokenizer())
    folder = converted_folder(read_gguf(path), torch.float32, with_tokenizer=False)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in model.state_dict().items():
        expected = written.get(tensor.numpy().tobytes(), tensor.numpy())
        assert np.array_equal(weights[name].numpy(), expected), name
    assert len(written) == sum(tensor.dim() > 1 for tensor in model.state_dict().values())


def test_the_readme_lists_the_types_that_load() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    match = re.search(r"GGUF \((.+?);", readme)
    assert match is not None
    assert match[1].split(", ") == [*_KINDS, *_SCALES]


def _without_tokenizer() -> dict[str, Any]:
    return {"tokenizer.ggml.tokens": None, "tokenizer.ggml.pre": "unheard-of"}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_transformers_computes_the_same_from_the_folder(
    write_tiny: WriteTiny, architecture: str
) -> None:
    model = tiny_model(
        architecture, num_key_value_heads=1, head_dim=32 if architecture == "qwen3" else 16
    )
    changes = _without_tokenizer()
    folder = converted_folder(read_gguf(write_tiny(model, changes=changes)), torch.float32, False)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    assert type(again) is type(model)
    for key in ("rope_parameters", "rms_norm_eps", "head_dim", "max_position_embeddings"):
        assert again.config.to_dict()[key] == model.config.to_dict()[key]


def test_biases_and_tied_embeddings(write_tiny: WriteTiny) -> None:
    model = tiny_model(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    folder = converted_folder(
        read_gguf(write_tiny(model, changes=_without_tokenizer())), torch.float32, False
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["attention_bias"]
    assert config["mlp_bias"]
    assert config["tie_word_embeddings"]
    weights = load_file(folder / "model.safetensors")
    expected = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    assert set(weights) == set(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("Q4_1", "auto", torch.bfloat16),
        ("Q8_0", "auto", torch.bfloat16),
        ("F16", "auto", torch.float16),
        ("BF16", "auto", torch.bfloat16),
        ("F32", "auto", torch.float32),
        ("Q4_1", "float32", torch.float32),
        ("Q4_1", "float16", torch.float16),
        ("F16", "bfloat16", torch.bfloat16),
    ],
)
def test_dtypes(write_tiny: WriteTiny, kind: str, dtype: str, expected: torch.dtype) -> None:
    path = write_tiny(kind=GGMLQuantizationType[kind])
    source = resolve_model(ModelOptions(model=str(path), dtype=dtype, quantization="none"))
    weights = load_file(source.path / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {expected}
    assert source.path.name.endswith(str(expected).removeprefix("torch."))
    if dtype == "auto":
        assert source.default_dtype == expected
        assert f"torch.{source.hf_config.dtype}" == str(expected)


def test_a_value_too_large_for_float16(write_tiny: WriteTiny, cache: Path) -> None:
    model = tiny_model()
    model.state_dict()["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e5
    path = write_tiny(model, changes=_without_tokenizer())
    options = ModelOptions(model=str(path), dtype="float16", tokenizer="elsewhere")
    with pytest.raises(WeightError, match=r"blk\.1\.ffn_up\.weight: values up to 100000"):
        resolve_model(options)
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]


def test_large_checkpoints_are_sharded(
    write_tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "_MAX_SHARD_BYTES", 100_000)
    model = tiny_model()
    changes = _without_tokenizer()
    folder = converted_folder(read_gguf(write_tiny(model, changes=changes)), torch.float32, False)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    again = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_the_file_of_a_tower_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    writer = GGUFWriter(path, "clip")
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="the tower of a model that sees; give the file of its"):
        convert(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_group_count": 8}, "expert_group_count"),
        ({"llama.attention.sliding_window": 4096}, "sliding_window"),
        ({"llama.logit_scale": 0.5}, "logit_scale"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"llama.rope.dimension_count": 8}, "8 rotated"),
        ({"split.count": 3}, "one of 3 files, which should be called NAME-00001-of-00003.gguf"),
        ({"llama.pooling_type": 4}, "pooling_type=4, which scores pairs, is not read from GGUF"),
        (
            {"general.architecture": "bloom"},
            "'bloom' is not supported; supported are llama, .*, qwen2,",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    write_tiny: WriteTiny, cache: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_tiny(changes={k: v for k, v in changes.items() if k != "general.architecture"})
    if architecture := changes.get("general.architecture"):
        path.write_bytes(path.read_bytes().replace(b"llama", architecture.encode()))
    with pytest.raises(ConfigError, match=message):
        convert(path)
    assert not cache.exists() or not [entry for entry in cache.iterdir() if entry.is_dir()]


def test_missing_metadata_and_unknown_tensors_are_named(write_tiny: WriteTiny) -> None:
    with pytest.raises(WeightError, match=r"lacks llama\.block_count"):
        convert(write_tiny(changes={"llama.block_count": None}))
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), np.float32)}
    with pytest.raises(ConfigError, match=r"no llama model has the tensors blk\.0\.ffn_gate_inp"):
        convert(write_tiny(extra_tensors=extra))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.block_count": 10**9}, "num_hidden_layers=1000000000 is more than the 1024"),
        ({"llama.block_count": 900}, "block_count is 900, and the file holds 2 blocks"),
        ({"llama.block_count": 1}, "block_count is 1, and the file holds 2 blocks"),
        ({"llama.embedding_length": 128}, r"embedding_length is 128, and .*\[\d+, 64\]"),
        ({"llama.embedding_length": 0}, "hidden_size should be a positive integer, got 0"),
        ({"llama.attention.head_count": 0}, "num_attention_heads should be a positive integer"),
        ({"llama.attention.key_length": 0, "llama.attention.value_length": 0}, "head_dim should"),
        ({"llama.rope.freq_base": -1.0}, r"rope_theta should be a positive number, got -1\.0"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "rms_norm_eps should be a positive"),
        ({"tokenizer.ggml.bos_token_id": 10**9}, "bos token is 1000000000 of"),
        ({"tokenizer.chat_template.a\0b": "x"}, "a chat template is called"),
        ({"tokenizer.chat_template.../../x": "x"}, "a chat template is called"),
    ],
)
def test_metadata_that_lies(
    write_tiny: WriteTiny, cache: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_tiny(changes=changes)
    with pytest.raises((ConfigError, WeightError), match=message) as raised:
        convert(path)
    assert str(path) in str(raised.value)
    assert visible_folders(cache) == hidden_folders(cache) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_values_that_are_no_numbers(
    write_tiny: WriteTiny, cache: Path, kind: str, value: float
) -> None:
    model = tiny_model(vocab_size=330)
    model.model.norm.weight.data[7] = value
    with pytest.raises(
        WeightError, match=r"tiny\.gguf: output_norm\.weight: 1 of 64 values are NaN or inf"
    ):
        convert(write_tiny(model, GGMLQuantizationType[kind]))
    assert visible_folders(cache) == []


def test_rope_scaling(write_tiny: WriteTiny) -> None:
    scaled = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert rope_of(convert(write_tiny(changes=scaled))) == {
        "rope_type": "linear",
        "rope_theta": 50000.0,
        "factor": 4.0,
    }
    scaled = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    assert rope_of(convert(write_tiny(changes=scaled))) == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
    }


def rope_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text())["rope_parameters"])


def test_llama3_scaling_is_found_in_its_divisors(write_tiny: WriteTiny) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=1024,
        num_attention_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 128, 2) / 128)
    divisors = (plain / scaled).numpy().astype(np.float32)
    model = tiny_model(
        head_dim=128,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    path = write_tiny(model, extra_tensors={"rope_freqs.weight": divisors})
    found = rope_of(convert_bare(path))
    assert found == parameters

    path = write_tiny(model, extra_tensors={"rope_freqs.weight": divisors * 2})
    with pytest.raises(ConfigError, match="rope_freqs"):
        convert_bare(path)


def convert_bare(path: Path) -> Path:
    return converted_folder(read_gguf(path), torch.float32, with_tokenizer=False)


def test_converted_once_and_again_when_the_content_changes(
    write_tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny()
    first = convert(path)

    def fail(*_: object) -> None:
        raise AssertionError("converted twice")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "_convert", fail)
        assert convert(path) == first
        os.utime(path, ns=(0, 1))
        assert convert(path) == first
        path = path.rename(path.with_name("another.gguf"))
        assert convert(path) == first
    # The same name and size, as a file that is fetched again may have.
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert convert(path) != first


def test_file_modes_follow_the_umask(write_tiny: WriteTiny) -> None:
    before = os.umask(0o022)
    try:
        folder = convert(write_tiny())
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()}
    assert set(modes.values()) == {0o644}, modes
    assert set(modes) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "stored.json",
    }


_CONVERT_WHEN_TOLD = """
import logging, sys, threading, time
from pathlib import Path
import torch
from atom.model_loader.gguf import convert
from atom.model_loader.gguf.convert import converted_folder
from atom.model_loader.gguf.file import read_gguf

def told(*args, write=convert._convert):
    print("Converting", file=sys.stderr)
    return write(*args)

convert._convert = told
logging.basicConfig(level=logging.INFO)
path, flags, number = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
file = read_gguf(path)
(flags / f"ready-{number}").touch()
while not (flags / "go").exists():
    time.sleep(0.001)
print(converted_folder(file, torch.float32, True))
"""


def test_three_processes_convert_at_once(
    write_tiny: WriteTiny, cache: Path, tmp_path: Path
) -> None:
    model = tiny_model(num_hidden_layers=24)
    path = write_tiny(model, changes={"llama.vocab_size": 96})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _CONVERT_WHEN_TOLD, str(path), str(tmp_path), str(i)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(3)
    ]
    while len(list(tmp_path.glob("ready-*"))) < 3:
        assert all(worker.poll() is None for worker in workers)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    seen: list[set[str]] = []
    while any(worker.poll() is None for worker in workers):
        seen += [{p.name for p in f.iterdir()} for f in visible_folders(cache)]
        time.sleep(0.0005)
    outputs = [worker.communicate() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], outputs
    folders = {out.strip() for out, _ in outputs}
    assert len(folders) == 1
    complete = {p.name for p in Path(folders.pop()).iterdir()}
    assert all(names == complete for names in seen)
    assert len(visible_folders(cache)) == 1
    assert not hidden_folders(cache)
    assert sum("Converting" in err for _, err in outputs) == 1


def visible_folders(cache: Path) -> list[Path]:
    if not cache.is_dir():
        return []
    return [p for p in cache.iterdir() if p.is_dir() and not p.name.startswith(".")]


def hidden_folders(cache: Path) -> list[Path]:
    return [p for p in cache.iterdir() if p.is_dir() and p.name.startswith(".")]


def test_without_locks_the_first_rename_wins(
    write_tiny: WriteTiny, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("this file system has no locks")

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    together = threading.Barrier(4)
    write_folder = gguf_convert._write_folder

    def write_together(*arguments: Any) -> None:
        write_folder(*arguments)
        together.wait(60)

    monkeypatch.setattr(gguf_convert, "_write_folder", write_together)
    path = write_tiny()
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(convert, [path] * 4))
    assert len(folders) == 1
    assert visible_folders(cache) == list(folders)
    assert not hidden_folders(cache)


def test_what_killed_processes_left_is_removed(write_tiny: WriteTiny, cache: Path) -> None:
    path = write_tiny()
    folder = convert(path)
    left = cache / f".{folder.name}.tmp-0123"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    for entry in folder.iterdir():
        entry.unlink()
    folder.rmdir()
    assert convert(path) == folder
    assert not left.exists()


def test_what_was_left_of_another_file_is_removed(write_tiny: WriteTiny, cache: Path) -> None:
    """Which may never be converted again; not what another process is writing."""
    dead, live = (cache / f".{name}-v6-bfloat16.tmp-0123" for name in ("dead", "live"))
    for each in (dead, live):
        each.mkdir(parents=True)
        (each / "model.safetensors").write_bytes(b"half")
    with FileLock(cache / ".live-v6-bfloat16.lock"):
        convert(write_tiny())
        assert not dead.exists()
        assert live.is_dir()


def test_no_room_and_no_permission(
    write_tiny: WriteTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny()
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATOM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set ATOM_CACHE"):
        convert(path)
    monkeypatch.setenv("ATOM_CACHE", str(tmp_path / "full"))
    usage = gguf_convert.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(gguf_convert.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"0\.1 GB are needed, 0\.0 GB are free"):
        convert(path)
    assert not hidden_folders(tmp_path / "full" / "gguf")


def test_embedded_values(embedded_source: ModelSource) -> None:
    from atom.model_loader.locate import embedded_model

    file = read_gguf(embedded_model())
    weights = load_file(embedded_source.path / "model.safetensors")
    for name, kind, heads in [("attn_v", "Q4_1", None), ("attn_k", "Q4_1", 3)]:
        tensor = file.tensors[f"blk.29.{name}.weight"]
        assert tensor.kind.name == kind
        raw = np.fromfile(file.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        values = reference_values(raw, kind).reshape(tensor.shape)
        if heads:
            pairs = values.reshape(heads, 32, 2, -1)
            values = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(tensor.shape)
        ours = weights[f"model.layers.29.self_attn.{name[-1]}_proj.weight"]
        assert torch.equal(ours, torch.from_numpy(values).to(torch.bfloat16))


@pytest.mark.slow
def test_the_embedded_model_equals_what_transformers_reads(embedded_source: ModelSource) -> None:
    from transformers import LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from atom.model_loader.locate import embedded_model

    with torch.device("meta"):
        model = LlamaForCausalLM(embedded_source.hf_config)
    expected = load_gguf_checkpoint(
        str(embedded_model()),
        return_tensors=True,
        model_to_load=model,
        torch_dtype=torch.bfloat16,
    )["tensors"]
    weights = load_file(embedded_source.path / "model.safetensors")
    assert set(weights) == {name for name in expected if name != "lm_head.weight"}
    for name, tensor in weights.items():
        assert torch.equal(tensor, torch.as_tensor(expected[name])), name


def test_the_embedded_configuration(embedded_source: ModelSource) -> None:
    config = embedded_source.hf_config
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 8192
    assert embedded_source.eos_token_ids == {0, 2}
    assert embedded_source.name == "SmolLM2-135M-Instruct"
    assert embedded_source.default_dtype == torch.bfloat16
