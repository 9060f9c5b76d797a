"""A file is opened and its header parsed once, and its tensors are mapped bit for bit."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from atom.config import ModelOptions
from atom.model_loader import checkpoint as checkpoint_module
from atom.model_loader import weights as weights_module
from atom.model_loader.checkpoint import list_tensors
from atom.model_loader.safetensors import reader as reader_module
from atom.model_loader.safetensors.reader import WeightFile, map_tensor
from atom.model_loader.source import ModelSource
from atom.model_loader.weights import WeightError, load_weights
from atom.model_ops.weight_mapping import WeightMapping

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint32,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.bool,
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    top = 2 if dtype is torch.bool else 256
    size = (torch.Size(shape).numel() * dtype.itemsize,)
    return (
        torch.randint(top, size, dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
    )


def test_tensors_are_mapped_bit_for_bit(tmp_path: Path) -> None:
    """Of all dtypes and shapes, as the format's own library reads them."""
    shapes: list[tuple[int, ...]] = [(), (0, 3), (1,), (7, 5), (2, 3, 701)]
    tensors = {f"{d}{list(s)}": random(d, *s) for d in DTYPES for s in shapes}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = load_file(tmp_path / "model.safetensors")
    listed = list_tensors(tmp_path)
    assert {tensor.name for tensor in listed} == set(expected)
    with WeightFile(tmp_path / "model.safetensors") as file:
        together = file.map(listed)
    for tensor, mapped in zip(listed, together, strict=True):
        for values in (mapped, map_tensor(tensor)):
            own = expected[tensor.name]
            assert (values.dtype, values.shape) == (own.dtype, own.shape)
            assert torch.equal(bits(values), bits(own)), tensor.name


def test_data_at_odd_offsets(tmp_path: Path) -> None:
    """The format allows it: a header of any length, and any order of dtypes."""
    values = random(torch.float32, 9)
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [9], "data_offsets": [3, 39]},
        "c": {"dtype": "F32", "shape": [2, 0], "data_offsets": [39, 39]},
    }
    text = json.dumps(header).encode()
    text += b" " * (len(text) % 2)
    content = len(text).to_bytes(8, "little") + text + b"abc" + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    a, b, c = list_tensors(tmp_path)
    assert bits(map_tensor(a)).tolist() == list(b"abc")
    assert torch.equal(bits(map_tensor(b)), bits(values))
    assert map_tensor(c).shape == (2, 0)


def test_a_map_that_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong with the file then."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    [tensor] = list_tensors(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(WeightError, match=r"bytes cannot be mapped: Cannot allocate .*ulimit"):
        map_tensor(tensor)
    path.unlink()
    with pytest.raises(WeightError, match=r"model\.safetensors cannot be opened: No such file"):
        map_tensor(tensor)


# With the bytes of 8 of them.
OTHER_DTYPES = {
    "C64": 64,
    "U64": 64,
    "U16": 16,
    "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}


def test_dtypes_that_no_parameter_has(tmp_path: Path) -> None:
    header, end = {}, 0
    for dtype, size in OTHER_DTYPES.items():
        header[dtype] = {"dtype": dtype, "shape": [4, 2], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(end)
    (tmp_path / "model.safetensors").write_bytes(data)
    tensors = list_tensors(tmp_path)
    assert {tensor.name: tensor.num_bytes for tensor in tensors} == OTHER_DTYPES
    for tensor in tensors:
        name = tensor.name
        with pytest.raises(WeightError, match=f"{name} is stored as {name}, which is not supp"):
            map_tensor(tensor)


def many(folder: Path, count: int, *shape: int) -> nn.Module:
    """Write tensors of bfloat16 -> a module with as many parameters, all of them zero."""
    tensors = {f"t{i}": torch.full(shape, i % 251, dtype=torch.bfloat16) for i in range(count)}
    save_file(tensors, folder / "model.safetensors")
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(torch.zeros_like(tensor), requires_grad=False))
    return model


def load(folder: Path, model: nn.Module) -> None:
    source = ModelSource(folder, "by hand", None, frozenset(), torch.float32)  # type: ignore[arg-type]
    load_weights(model, WeightMapping(), source, ModelOptions())


def test_a_file_is_opened_and_its_header_parsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tensors and groups of them there are."""
    model = many(tmp_path, 3300, 4)
    monkeypatch.setattr(weights_module, "_GROUP_BYTES", 800)
    monkeypatch.setattr(weights_module, "default_num_threads", lambda: 4)
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(checkpoint_module, "read_header")
    count(reader_module, "_parse")
    count(Path, "open")
    count(WeightFile, "map")
    load(tmp_path, model)
    # One more open for the header.
    assert counts == {"read_header": 1, "_parse": 1, "open": 2, "map": 33}
    for i, parameter in enumerate(model.parameters()):
        assert parameter.tolist() == [i % 251] * 4
    counts.clear()
    load(tmp_path, model)
    assert counts == {"open": 1, "map": 33}


def test_the_log_says_how_fast_weights_were_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it takes as it is stored here, a shared parameter once, and what of the files it is."""
    model = many(tmp_path, 1, 6000, 1000)
    model.register_parameter("t1", model.t0)
    save_file({"t0": torch.ones(6000, 1000)}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO, "atom.model_loader.weights"):
        load(tmp_path, model)
    assert re.fullmatch(
        r"by hand: loaded 0\.01 GB of weights from 0\.02 GB of files in \d+\.\d s, \d+\.\d\d GB/s",
        caplog.messages[-1],
    )


MEASURE = """
import sys
from pathlib import Path
from atom.model_loader.checkpoint import list_tensors
from atom.model_loader.safetensors.reader import WeightFile

def mapped():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024

tensors = list_tensors(Path(sys.argv[1]))
before, most = mapped(), 0
with WeightFile(tensors[0].file) as file:
    for tensor in tensors:
        (values,) = file.map([tensor])
        values.sum()
        most = max(most, mapped() - before)
        del values
    part = file.map(tensors)[0]
    part.sum()
print(most, mapped() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_a_file_are_released(tmp_path: Path) -> None:
    """What is mapped is one tensor, of 64, and nothing where nobody reads."""
    num_bytes = 1 << 21
    save_file(
        {f"t{i}": torch.zeros(num_bytes, dtype=torch.uint8) for i in range(64)},
        tmp_path / "model.safetensors",
    )
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    most, of_one = map(int, done.stdout.split())
    slack = 8 << 20  # code that the first sum maps, pages beside those that are read
    assert num_bytes <= most <= num_bytes + slack
    assert of_one <= num_bytes + slack
