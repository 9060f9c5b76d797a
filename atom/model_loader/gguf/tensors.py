"""GGUF tensors as Hugging Face tensors: names, order of rows, values or blocks.

Sources: `gguf.constants.TENSOR_NAMES` for names, `gguf.quants` for dequantisation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from atom.config import ConfigError
from atom.model_loader.errors import WeightError, name_some
from atom.model_loader.gguf.architectures import (
    UP_KEYS,
    UP_VALUES,
    Architecture,
    architecture_of,
)
from atom.model_loader.gguf.blocks import read_part
from atom.model_loader.gguf.delta_net import column_order, prediction_name, row_order
from atom.model_loader.gguf.file import GGUFFile, GGUFTensor
from atom.model_ops.finite import check_finite

_FLOAT_KINDS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_CHUNK_ELEMENTS = 1 << 22

# What tensors that stay in float32 end with: few numbers, whose rounding changes choices.
_DECAYS = "attn.A_log"
PRECISE = ("e_score_correction_bias", "self_attn.sinks", _DECAYS, "attn.dt_bias")
# Factors of frequencies, which become part of the configuration.
_NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


@dataclass(frozen=True)
class ConvertedTensor:
    """Attributes:
    name: in the Hugging Face checkpoint.
    interleaved_head_dim: rows per head if the two rotary halves are interleaved row by row; None if
    the rows are in Hugging Face order.
    subtracted: from each value.
    rows, columns: of the source, in the checkpoint's order; None where it is the same.
    beside: the values' part of an up-projection of latents, [heads, size, rank]; the source is then
        the keys' part, [heads, rank, size].
    """

    name: str
    source: GGUFTensor
    interleaved_head_dim: int | None
    subtracted: float = 0.0
    beside: GGUFTensor | None = None
    rows: np.ndarray | None = field(default=None, compare=False)
    columns: np.ndarray | None = field(default=None, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """In the checkpoint."""
        if self.rows is not None:
            return len(self.rows), *self.source.shape[1:]
        if self.beside is None:
            return self.source.shape
        heads, rank, size = self.source.shape
        return heads * (size + self.beside.shape[1]), rank


def plan_tensors(file: GGUFFile, config: Mapping[str, Any]) -> list[ConvertedTensor]:
    """The tensors of the file that become weights, in file order.

    Args:
        config: as `config_dict` makes it.

    Raises:
        ConfigError: for tensors that the model does not have, or of an unknown type.
        WeightError: for tensors that do not split as they should.
    """
    planned = []
    unknown = []
    architecture = architecture_of(file)
    for tensor in file.tensors.values():
        if tensor.name in _NOT_WEIGHTS:
            continue
        name = _hugging_face_name(architecture, tensor.name)
        if name is None:
            unknown.append(tensor.name)
            continue
        for part_name, part in _parts(name, tensor, config):
            reordered = architecture.pairs and re.search(r"\.self_attn\.[qk]_proj\.", part_name)
            unit = config["head_dim"] if reordered else None
            has_one = architecture.adds_one and part_name.endswith("norm.weight")
            has_one = has_one and not part_name.endswith("linear_attn.norm.weight")
            planned.append(ConvertedTensor(part_name, part, unit, float(has_one)))
    planned = _with_up_projections(planned)
    if "linear_num_key_heads" in config:
        planned = [_of_delta_net(each, architecture, config) for each in planned]
    if unknown:
        raise ConfigError(
            f"{file.path}: no {file.architecture} model has the tensors {name_some(unknown)}"
        )
    sources = [source for t in planned for source in (t.source, t.beside) if source is not None]
    for kind in {source.kind for source in sources}:
        _check_kind(file, kind)
    return planned


def _of_delta_net(
    tensor: ConvertedTensor, architecture: Architecture, config: Mapping[str, Any]
) -> ConvertedTensor:
    """With rows and columns in the checkpoint's order, and its name of a prediction layer.

    Raises:
        WeightError: when the tensor has another size than its heads.
    """
    tiles, source = architecture.tiles_heads, tensor.source
    rows = row_order(tensor.name, source.name, tiles, config)
    columns = column_order(tensor.name, tiles, config)
    for axis, order in enumerate((rows, columns)):
        if order is not None and (
            len(source.shape) <= axis or int(order.max()) >= source.shape[axis]
        ):
            raise WeightError(
                f"{source.path}: {source.name} is {list(source.shape)}, too small for "
                f"ssm.time_step_rank={config['linear_num_value_heads']}"
            )
    name = prediction_name(tensor.name, config["num_hidden_layers"])
    return replace(tensor, name=name, rows=rows, columns=columns)


def _with_up_projections(planned: list[ConvertedTensor]) -> list[ConvertedTensor]:
    """The two parts of an up-projection of latents are one tensor.

    Raises:
        WeightError: when they do not fit.
    """
    values = {t.name: t.source for t in planned if f".{UP_VALUES}." in t.name}
    joined = []
    for tensor in planned:
        if tensor.name in values:
            continue
        if f".{UP_KEYS}." in tensor.name:
            beside = values.get(tensor.name.replace(UP_KEYS, UP_VALUES))
            _check_up_projection(tensor.source, beside)
            name = tensor.name.replace(UP_KEYS, UP_KEYS.rpartition(".")[0])
            tensor = replace(tensor, name=name, beside=beside)
        joined.append(tensor)
    return joined


def _check_up_projection(keys: GGUFTensor, values: GGUFTensor | None) -> None:
    shapes = [keys.shape, () if values is None else values.shape]
    if [len(shape) for shape in shapes] != [3, 3] or shapes[0][:2] != shapes[1][::2]:
        raise WeightError(
            f"{keys.path}: {keys.name} of shape {list(shapes[0])} and the attn_v_b beside it of "
            f"{list(shapes[1])} should be [heads, rank, size] and [heads, size, rank]"
        )


def _hugging_face_name(architecture: Architecture, name: str) -> str | None:
    """With `*` and spaces as in the table."""
    stem, _, suffix = name.rpartition(".")
    if suffix == "ssm_a":  # without one
        stem, suffix = name, "weight"
    if suffix not in ("weight", "bias"):
        return None
    if match := re.fullmatch(r"blk\.(\d+)\.([\w.]+)", stem):
        layer, part = match.groups()
        modules = architecture.layer.get(part, "").split()
        if modules and modules[0].endswith(PRECISE):
            return f"{architecture.layers}.{layer}.{modules[0]}"
        prefix = f"{architecture.layers}.{layer}"
        return " ".join(f"{prefix}.{module}.{suffix}" for module in modules) or None
    outer = architecture.outer.get(stem)
    return f"{outer}.{suffix}" if outer else None


def _parts(
    name: str, tensor: GGUFTensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, GGUFTensor]]:
    """The tensors of the checkpoint that one of the file holds."""
    names = name.split()
    if "*" in name:
        for expert in range(tensor.shape[0]):
            part = _rows_of(tensor, expert, 1)
            yield name.replace("*", str(expert)), replace(part, shape=tensor.shape[1:])
    elif "in_proj_b" in name:
        yield from ((part_name, tensor) for part_name in names)
    elif len(names) > 1:
        start = 0
        for part_name, count in zip(names, _row_counts(len(names), tensor, config), strict=True):
            yield part_name, _rows_of(tensor, start, count)
            start += count
    elif name.endswith("_conv1d.weight"):  # channels between dimensions of 1
        yield name, replace(tensor, shape=(tensor.num_rows, *tensor.shape[-1:]))
    elif name.endswith("shared_expert_gate.weight"):
        yield name, replace(tensor, shape=(1, *tensor.shape[-1:]))
    else:
        yield name, tensor


def _row_counts(count: int, tensor: GGUFTensor, config: Mapping[str, Any]) -> list[int]:
    """Of queries, keys and values, or of gate and up projection."""
    queries, keys = (
        config[field] * config["head_dim"]
        for field in ("num_attention_heads", "num_key_value_heads")
    )
    counts = [queries, keys, keys] if count == 3 else [config["intermediate_size"]] * count
    if sum(counts) != tensor.shape[0]:
        raise WeightError(
            f"{tensor.path}: {tensor.name} has {tensor.shape[0]} rows, expected "
            f"{' + '.join(str(rows) for rows in counts)}"
        )
    return counts


def _rows_of(tensor: GGUFTensor, first: int, count: int) -> GGUFTensor:
    """Some of the outermost dimension."""
    each = tensor.num_bytes // tensor.shape[0]
    return replace(
        tensor,
        shape=(count, *tensor.shape[1:]),
        offset=tensor.offset + first * each,
        num_bytes=count * each,
    )


def _check_kind(file: GGUFFile, kind: GGMLQuantizationType) -> None:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        raise ConfigError(
            f"{file.path} holds tensors of type {kind.name}, which cannot be read"
        ) from None


def automatic_dtype(file: GGUFFile) -> torch.dtype:
    """The dtype of `--dtype auto`: bfloat16 for quantised weights, else that of most weights."""
    elements: Counter[GGMLQuantizationType] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            elements[tensor.kind] += tensor.num_elements
    if not elements:
        raise WeightError(f"{file.path} holds no matrices")
    if any(kind not in _FLOAT_KINDS for kind in elements):
        return torch.bfloat16
    return _FLOAT_KINDS[elements.most_common(1)[0][0]]


def has_blocks(file: GGUFFile) -> bool:
    """Whether any tensor is quantised."""
    return any(tensor.kind not in _FLOAT_KINDS for tensor in file.tensors.values())


def read_values(tensor: ConvertedTensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The tensor's values row by row, in chunks of a few million elements.

    Raises:
        WeightError: when a value is NaN or infinite, or would be infinite in `dtype`.
    """
    name = f"{tensor.source.path}: {tensor.source.name}"
    if tensor.beside is not None:
        yield _narrowed(_up_projection(tensor.source, tensor.beside), dtype, name)
        return
    for raw in _read_rows(tensor):
        values = _values_of(raw, tensor.source.kind)
        if tensor.subtracted:
            values = values.float() - tensor.subtracted
        if tensor.name.endswith(_DECAYS):
            values = (-values.float()).log()
        if tensor.columns is not None:
            values = values[:, torch.from_numpy(tensor.columns)]
        yield _narrowed(values, dtype, name)


def _values_of(raw: np.ndarray, kind: GGMLQuantizationType) -> torch.Tensor:
    """Bytes of rows -> [rows, columns], as they are stored if they are plain numbers."""
    if (dtype := _FLOAT_KINDS.get(kind)) is not None:
        return torch.from_numpy(raw).view(dtype)
    return torch.from_numpy(dequantize(raw, kind))


def _up_projection(keys: GGUFTensor, values: GGUFTensor) -> torch.Tensor:
    """[heads * (keys' and values' size), rank], the rows of each head together."""
    parts = [_all_values(keys).transpose(1, 2), _all_values(values)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _all_values(tensor: GGUFTensor) -> torch.Tensor:
    rows = np.concatenate(list(_read_rows(ConvertedTensor(tensor.name, tensor, None))))
    return _values_of(rows, tensor.kind).view(tensor.shape)


def read_blocks(
    tensor: ConvertedTensor, parts: Sequence[str], by_kernels: bool
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors `parts` of a matrix whose blocks are kept, in the same chunks.

    Args:
        by_kernels: as for `read_part`.

    Raises:
        WeightError: when a scale is NaN or infinite.
    """
    kind = tensor.source.kind
    for raw in _read_rows(tensor):
        blocks, size = torch.from_numpy(raw), GGML_QUANT_SIZES[kind][1]
        found = []
        for part in parts:
            found.append(read_part(kind.name, part, blocks, size, by_kernels=by_kernels))
            _check_finite(found[-1], f"{tensor.source.path}: {tensor.source.name}")
        yield tuple(found)


def _read_rows(tensor: ConvertedTensor) -> Iterator[np.ndarray]:
    """Bytes of rows, [rows, bytes of a row], in Hugging Face's order."""
    source = tensor.source
    block, block_bytes = GGML_QUANT_SIZES[source.kind]
    # A vector is read as a column, so that its elements can be reordered like rows.
    is_vector = len(source.shape) == 1 and block == 1
    rows, columns = (source.shape[0], 1) if is_vector else (source.num_rows, source.shape[-1])
    row_bytes = columns // block * block_bytes
    unit = tensor.interleaved_head_dim or 1
    if rows % unit:
        raise WeightError(f"{source.name}: {rows} rows are no multiple of head_dim={unit}")
    if tensor.rows is not None:
        with source.path.open("rb") as handle:
            handle.seek(source.offset)
            whole = np.fromfile(handle, np.uint8, rows * row_bytes).reshape(rows, row_bytes)
        yield whole[tensor.rows]
        return
    step = max(_CHUNK_ELEMENTS // columns // unit, 1) * unit
    with source.path.open("rb") as handle:
        for first in range(0, rows, step):
            count = min(step, rows - first)
            handle.seek(source.offset + first * row_bytes)
            raw = np.fromfile(handle, np.uint8, count * row_bytes).reshape(count, row_bytes)
            if tensor.interleaved_head_dim:
                raw = _halves_apart(raw, tensor.interleaved_head_dim)
            yield raw


def _halves_apart(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """The even rows of each head first, then the odd ones."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _check_finite(values: torch.Tensor, name: str) -> None:
    try:
        check_finite(values)
    except ValueError as error:
        raise WeightError(f"{name}: {error}") from None


def _narrowed(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    _check_finite(values, name)
    narrowed = values.to(dtype)
    if dtype == torch.float16 and bool((narrowed.isinf() & values.isfinite()).any()):
        raise WeightError(
            f"{name}: values up to {values.abs().max().item():g} do not fit float16; "
            f"use --dtype bfloat16 or float32"
        )
    return narrowed
