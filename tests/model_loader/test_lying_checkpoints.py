"""Checkpoints whose files contradict each other or are no files: refused, by name, for nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from safetensors.torch import load_file, save_file

from atom.config import ConfigError, ModelOptions
from atom.model_loader import sketch
from atom.model_loader.checkpoint import list_tensors
from atom.model_loader.errors import WeightError
from atom.model_loader.safetensors.reader import WeightFile
from atom.model_loader.source import resolve_model
from atom.model_loader.tokenizers.tokenizer import load_tokenizer
from atom.model_loader.weights import build_model
from atom.model_ops.layer_context import LayerContext
from atom.models.registry import create_model
from atom.platform import cpu_platform

Weights = dict[str, torch.Tensor]


def load(folder: Path, max_model_len: int = 64, **options: Any) -> torch.nn.Module:
    """What the engine does until the model stands."""
    model_options = ModelOptions(model=str(folder), **options)
    source = resolve_model(model_options)
    context = LayerContext.create(torch.float32, max_model_len, cpu_platform())
    return build_model(partial(create_model, source.hf_config), source, context, model_options)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    for family in ("llama", "qwen3", "deepseek_v3"):
        getattr(checkpoints, family)(folder / family)
    return folder


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: Path(shutil.copytree(originals / family, tmp_path / family))


def edit(folder: Path, **fields: Any) -> Path:
    checkpoints.edit_config(folder, **fields)
    return folder


HUGE = [
    ("llama", "num_hidden_layers"),
    ("llama", "head_dim"),
    ("llama", "hidden_size"),
    ("llama", "intermediate_size"),
    ("llama", "vocab_size"),
    ("llama", "num_attention_heads"),
    ("llama", "num_key_value_heads"),
    ("llama", "max_position_embeddings"),
    ("llama", "num_labels"),
    ("qwen3", "num_hidden_layers"),
    ("deepseek_v3", "n_routed_experts"),
    ("deepseek_v3", "n_shared_experts"),
    ("deepseek_v3", "moe_intermediate_size"),
    ("deepseek_v3", "kv_lora_rank"),
    ("deepseek_v3", "qk_nope_head_dim"),
    ("deepseek_v3", "num_nextn_predict_layers"),
]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(("family", "field"), HUGE)
def test_huge_sizes(copy: Callable[[str], Path], family: str, field: str, load_format: str) -> None:
    folder = edit(copy(family), **{field: 10**9})
    with pytest.raises(
        ConfigError, match=rf"config\.json of type \w+: {field}=1000000000 is more than the"
    ):
        load(folder, load_format=load_format)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"num_hidden_layers": 900}, r"num_hidden_layers=900.* hold 3 layers"),
        ("llama", {"num_hidden_layers": 2}, r"unexpected tensors .*model\.layers\.2\."),
        ("llama", {"head_dim": 512}, r"q_proj\.weight \[48, 48\]: .* the model wants \[2048, 48\]"),
        ("llama", {"intermediate_size": 1 << 20}, r"up_proj\.weight \[64, 48\]: .* 1048576"),
        ("llama", {"vocab_size": 1 << 24}, r"embed_tokens\.weight \[96, 48\]: .*\[16777216, 48\]"),
        ("llama", {"hidden_size": 1 << 18}, r"norm\.weight \[48\]: .*\[262144\]"),
        ("llama", {"tie_word_embeddings": True, "vocab_size": 97}, r"embed_tokens.*\[97, 48\]"),
        ("deepseek_v3", {"n_routed_experts": 1 << 16}, r"experts\.w13_weight \(lacks 8\.gate_proj"),
        ("deepseek_v3", {"kv_lora_rank": 1 << 18}, r"kv_a_layernorm\.weight \[32\]: .*\[262144\]"),
    ],
)
def test_sizes_that_the_weight_files_contradict(
    copy: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    fields: dict[str, Any],
    message: str,
) -> None:
    folder = edit(copy(family), **fields)
    made = []
    empty = LayerContext.empty

    def watched(context: LayerContext, *shape: int) -> torch.nn.Parameter:
        made.append(context.device.type)
        return empty(context, *shape)

    monkeypatch.setattr(LayerContext, "empty", watched)
    with pytest.raises(WeightError, match=message):
        load(folder)
    assert set(made) <= {"meta"}


def test_dummy_models_larger_than_the_memory(copy: Callable[[str], Path]) -> None:
    folder = edit(copy("llama"), intermediate_size=1 << 20, hidden_size=1 << 18)
    with pytest.raises(ConfigError, match=r"config\.json describes .* take 9\d{3}\.\d GB in float"):
        load(folder, load_format="dummy")


def test_weights_larger_than_the_machine(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketch, "total_memory_bytes", lambda _: 1000)
    with pytest.raises(ConfigError, match=r"take 0\.0 GB in float32, and the cpu has 0\.0 GB"):
        load(copy("llama"))


def test_contexts_larger_than_the_memory(copy: Callable[[str], Path]) -> None:
    folder = edit(copy("llama"), head_dim=12, max_position_embeddings=1 << 28)
    with pytest.raises(ConfigError, match=r"rotating 10000000000000 positions .*--max-model-len"):
        load(folder, max_model_len=10**13)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads should be a positive integer, got 0"),
        ({"hidden_size": -48}, "hidden_size should be a positive integer, got -48"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps should be a positive number, got -1e-05"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps should be a positive number, got nan"),
        ({"text_config": 7}, "text_config=7"),
        ({"eos_token_id": 96}, r"token 96 .* tokens 0 to 95"),
        ({"eos_token_id": -1}, r"token -1 .* tokens 0 to 95"),
        ({"dtype": ["float32"]}, "stored as"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e-300}},
            "describes no model that can be built: .* infinitely fast",
        ),
    ],
)
def test_impossible_values(
    copy: Callable[[str], Path], fields: dict[str, Any], message: str
) -> None:
    folder = copy("llama")
    (folder / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match=message) as raised:
        load(edit(folder, **fields))
    assert str(folder) in str(raised.value)


def test_experts_that_do_not_split_into_groups(copy: Callable[[str], Path]) -> None:
    folder = edit(copy("deepseek_v3"), n_group=3)
    with pytest.raises(ConfigError, match=r"config\.json .* 8 experts do not split into n_group=3"):
        load(folder)


@pytest.mark.parametrize("depth", [200, 100_000])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
    ],
)
def test_brackets_nested_too_deep(copy: Callable[[str], Path], name: str, depth: int) -> None:
    folder = copy("llama")
    (folder / name).write_text('{"a":' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ConfigError, match=rf"{name} cannot be read as JSON: .* deeper than 100"):
        load(folder)


def test_a_tokenizer_nested_too_deep(tiny_llama_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama_dir, tmp_path / "model"))
    options = ModelOptions(model=str(folder))
    source = resolve_model(options)
    (folder / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        load_tokenizer(source, options)


def replace_by_pipe(path: Path) -> str:
    os.mkfifo(path)
    return "is a named pipe"


def replace_by_link_to_device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "is a device"


def replace_by_directory(path: Path) -> str:
    path.mkdir()
    return "is a directory"


def replace_by_broken_link(path: Path) -> str:
    path.symlink_to("nowhere")
    return r"\(a link to nowhere\) cannot be opened"


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ],
)
@pytest.mark.parametrize(
    "replace",
    [
        replace_by_pipe,
        replace_by_link_to_device,
        replace_by_directory,
        replace_by_broken_link,
    ],
)
def test_only_regular_files_are_opened(
    copy: Callable[[str], Path], name: str, replace: Callable[[Path], str]
) -> None:
    folder = copy("llama")
    (folder / name).unlink(missing_ok=True)
    message = replace(folder / name)
    with pytest.raises(ConfigError, match=f"{name} {message}"):
        load(folder)


def test_models_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has to be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("model.gguf")
        with pytest.raises(ConfigError, match=r"model\.gguf is a socket"):
            resolve_model(ModelOptions(model="model.gguf"))
        with pytest.raises(ConfigError, match=r"model\.gguf is a socket"):
            resolve_model(ModelOptions(model="."))
    os.mkfifo("pipe")
    with pytest.raises(ConfigError, match="pipe is a named pipe"):
        resolve_model(ModelOptions(model="pipe"))


def test_links_to_files_are_followed(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)
    load(folder)


def write_header(folder: Path, header: object, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + data)


def entry(shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


UNDESCRIBED = "a is not described by a dtype, a shape and two offsets"


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        ({"a": entry([16], 0, 64)}, 1 << 60, "says that its header has 1152921504606846976 bytes"),
        ({"a": entry([16], 0, 64)}, 200, "says that its header has 200 bytes"),
        ({"a": entry([1000], 0, 4000)}, None, r"describes 4\d\d\d bytes"),
        ({"a": entry([8], 0, 32)}, None, r"describes \d+ bytes"),
        ({}, None, "describes 10 bytes"),
        ({"a": entry([16], 0, 64), "b": entry([16], 0, 64)}, None, "b begins at byte"),
        ({"a": entry([8], 0, 32), "b": entry([10], 24, 64)}, None, "b begins at byte"),
        ({"a": entry([4], 0, 16), "b": entry([4], 48, 64)}, None, "b begins at byte"),
        ({"a": entry([16], 8, 72)}, None, "a begins at byte"),
        ({"a": entry([15], 0, 64)}, None, r"a \[15\] of F32 takes 60 bytes"),
        ({"a": entry([], 0, 64)}, None, r"a \[\] of F32 takes 4 bytes"),
        ({"a": entry([16], 64, 0)}, None, r"its offsets are \[64, 0\]"),
        ({"a": entry([127], 0, 64) | {"dtype": "F4"}}, None, "takes 63.5 bytes"),
        ({"a": entry([1 << 33, 1 << 33], 0, 64)}, None, "takes 2.95148e"),
        ({"a": entry([16], 0, 64) | {"dtype": "F33"}}, None, "a is stored as F33, which is no"),
        ({"a": entry([-16], 0, 64)}, None, UNDESCRIBED),
        ({"a": entry([16], -64, 0)}, None, UNDESCRIBED),
        ({"a": entry([16], 0, 64) | {"shape": [True, 16]}}, None, UNDESCRIBED),
        ({"a": entry([16], 0, 64) | {"shape": [16.0]}}, None, UNDESCRIBED),
        ({"a": entry([16], 0, 64) | {"shape": 16}}, None, UNDESCRIBED),
        ({"a": entry([16], 0, 64) | {"data_offsets": [0, 32, 64]}}, None, UNDESCRIBED),
        ({"a": entry([16], 0, 64) | {"dtype": ["F32"]}}, None, UNDESCRIBED),
        ({"a": {"dtype": "F32", "shape": [16]}}, None, UNDESCRIBED),
        ({"a": "F32"}, None, UNDESCRIBED),
        ({"a": entry([1] * 9 + [16], 0, 64)}, None, "a has 10 dimensions of up to 16"),
        (
            {"a": entry([0, 1 << 62], 0, 0), "b": entry([16], 0, 64)},
            None,
            "a has 2 dimensions of up to 4611686018427387904",
        ),
        ([entry([16], 0, 64)], None, "its header is no JSON object"),
        (b'{"a": \xff}', None, "utf-8"),
        (b"[" * 100_000, None, "recursion"),
        (b'{"__metadata__":' + b'{"a":' * 100_000, None, "recursion"),
    ],
)
def test_headers_that_lie(tmp_path: Path, header: object, length: int | None, message: str) -> None:
    write_header(tmp_path, header, b"\0" * 64, length)
    with pytest.raises(WeightError, match=rf"model\.safetensors is damaged .*{message}"):
        list_tensors(tmp_path)


def test_a_header_of_the_greatest_length(tmp_path: Path) -> None:
    """More is refused before it is read, however long the file is."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(300_000_000)
    with pytest.raises(WeightError, match="says that its header has 100000001 bytes"):
        list_tensors(tmp_path)


def test_a_file_that_became_shorter_is_refused(copy: Callable[[str], Path]) -> None:
    """Not mapped: reading what is not there would end the process."""
    tensor = list_tensors(copy("llama"))[-1]
    with WeightFile(tensor.file) as file:
        with tensor.file.open("rb+") as changed:
            changed.truncate(tensor.offset + tensor.num_bytes - 1)
        with pytest.raises(WeightError, match=r"model\.safetensors cannot be read: it has"):
            file.map([tensor])


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", {"a": 1}, {"a": None}, {"a": ["b"]}])
def test_an_index_of_another_shape(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightError, match=r"index\.json"):
        list_tensors(tmp_path)


@pytest.mark.parametrize("tensor", [torch.tensor(1.0), torch.zeros(0, 48), torch.ones(1, 1, 96)])
@pytest.mark.parametrize(
    "name", ["embed_tokens", "layers.0.mlp.up_proj", "layers.1.self_attn.k_proj"]
)
def test_tensors_of_other_dimensions(
    copy: Callable[[str], Path], name: str, tensor: torch.Tensor
) -> None:
    folder = copy("llama")
    path = folder / "model.safetensors"
    weights: Weights = load_file(path)
    save_file(weights | {f"model.{name}.weight": tensor}, path)
    with pytest.raises(WeightError, match=rf"wrong tensors \(1\): model\.{name}\.weight \["):
        load(folder)
