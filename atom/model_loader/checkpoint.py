"""Lists the safetensors files of a folder and their tensors, without reading weights."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path

from atom.model_loader.errors import WeightError, name_some
from atom.model_loader.safetensors.reader import CheckpointTensor, read_header
from atom.models.config.file import check_regular, is_there, read_json

_INDEX = "model.safetensors.index.json"
# Headers that are kept.
_MOST_FILES = 1024
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def has_weights(folder: Path) -> bool:
    """Whether a folder holds safetensors files, or an index that promises some."""
    return is_there(folder / _INDEX) or bool(_weight_files(folder))


def list_adapters(folder: Path) -> list[Path]:
    """Files beside a model's weights that change them and are no weights themselves."""
    return sorted(folder.glob("adapter_model*.safetensors"))


def list_tensors(folder: Path) -> list[CheckpointTensor]:
    """All tensors of a folder's checkpoint, file by file in the order of their data.

    Raises:
        WeightError: when a file is missing or damaged, or a tensor is in two files.
    """
    weight_map = _read_index(folder)
    files = _files_without_index(folder) if weight_map is None else _files(folder, weight_map)
    tensors = [tensor for file in files for tensor in _tensors_of(file)]
    counts = Counter(tensor.name for tensor in tensors)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise WeightError(f"{folder}: tensors occur in several files: {name_some(twice)}")
    if weight_map is not None:
        _check_index(folder, weight_map, tensors)
    return tensors


def stored_dtype(folder: Path) -> str | None:
    """torch's name of the dtype of most weights, by bytes; None without weights."""
    if not has_weights(folder):
        return None
    num_bytes: Counter[str] = Counter()
    for tensor in list_tensors(folder):
        num_bytes[tensor.dtype] += tensor.num_bytes
    most = num_bytes.most_common(1)
    return _DTYPE_NAMES.get(most[0][0], most[0][0]) if most else None


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / _INDEX
    if not is_there(path):
        return None
    content = read_json(path)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{path} is no index of safetensors files: it holds no weight_map")
    if wrong := [name for name, file in weight_map.items() if type(file) is not str]:
        raise WeightError(f"{path} names no file for {name_some(wrong)}")
    return weight_map


def _files(folder: Path, weight_map: dict[str, str]) -> list[Path]:
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise WeightError(f"{folder / _INDEX} names files elsewhere: {name_some(outside)}")
    if missing := [name for name in names if not is_there(folder / name)]:
        raise WeightError(f"{folder / _INDEX} names files that are not there: {name_some(missing)}")
    return [folder / name for name in names]


def _files_without_index(folder: Path) -> list[Path]:
    files = _weight_files(folder)
    # Some publishers add the same weights under their own names in consolidated files.
    own = [file for file in files if not file.name.startswith("consolidated")]
    if not files:
        raise WeightError(f"{folder} holds no *.safetensors files")
    return own or files


def _weight_files(folder: Path) -> list[Path]:
    adapters = list_adapters(folder)
    return [file for file in sorted(folder.glob("*.safetensors")) if file not in adapters]


def _tensors_of(file: Path) -> tuple[CheckpointTensor, ...]:
    status = check_regular(file)
    return _read_header(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=_MOST_FILES)
def _read_header(file: Path, size: int, _changed: int) -> tuple[CheckpointTensor, ...]:
    """Kept until the file changes, since several checks of a start read all headers."""
    return read_header(file, size)


def _check_index(folder: Path, weight_map: dict[str, str], tensors: list[CheckpointTensor]) -> None:
    found = {tensor.name for tensor in tensors if weight_map.get(tensor.name) == tensor.file.name}
    if missing := [name for name in weight_map if name not in found]:
        raise WeightError(
            f"{folder / _INDEX} names tensors that are not in their files: {name_some(missing)}"
        )
