"""Converts a GGUF file to a Hugging Face folder in the cache, once.

The folder is written under a temporary name and renamed when complete; one that has lost something
since (`stored.py`) is converted again. A lock prevents two processes from doing the same work; the
rename keeps the result correct even where locks do not work.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from gguf.constants import GGML_QUANT_SIZES
from tqdm import tqdm

from atom.config import ConfigError
from atom.environment import cache_dir, cache_limit
from atom.model_loader.gguf import locks
from atom.model_loader.gguf.blocks import kernels_read_codes
from atom.model_loader.gguf.cache import CONVERTER_VERSION, make_room, use
from atom.model_loader.gguf.config import (
    POOLING,
    check_architecture,
    config_dict,
    generation_config_dict,
)
from atom.model_loader.gguf.content import check_unchanged, content_key
from atom.model_loader.gguf.file import GGUFFile
from atom.model_loader.gguf.pooling import NONE, write_modules
from atom.model_loader.gguf.stored import (
    NotStored,
    bring_to_disk,
    check_stored,
    is_stored,
    note_written,
)
from atom.model_loader.gguf.tensors import (
    PRECISE,
    ConvertedTensor,
    plan_tensors,
    read_blocks,
    read_values,
)
from atom.model_loader.gguf.tokenizer import write_tokenizer
from atom.model_loader.safetensors.writer import TensorGroup, TensorSpec, write_checkpoint
from atom.model_loader.threads import single_threaded_pool
from atom.model_ops.quant.formats.gguf import TYPES, config_of, stored_tensors
from atom.processors import default_num_threads

# Which matrices of a GGUF file keep their blocks, and why others become plain numbers.


@dataclass(frozen=True)
class KeptBlocks:
    """Attributes:
    types: GGUF's name of the type by module, of those whose blocks are kept.
    dequantised: why others are plain numbers -> how many.
    """

    types: Mapping[str, str]
    dequantised: Mapping[str, int]


def choose_kept(tensors: Sequence[ConvertedTensor]) -> KeptBlocks:
    """Keep the quantised matrices whose type has a format."""
    types, dequantised = {}, Counter[str]()
    for tensor in tensors:
        kind = tensor.source.kind
        if tensor.beside is not None and GGML_QUANT_SIZES[kind][0] > 1:
            dequantised["stored transposed"] += 1
        if len(tensor.source.shape) != 2 or GGML_QUANT_SIZES[kind][0] == 1:
            continue
        if tensor.columns is not None:
            dequantised["with columns in another order"] += 1
        elif tensor.name.endswith(
            (".eh_proj.weight", "mtp.fc.weight")
        ):  # plain numbers in every model
            dequantised["of prediction layers' projections"] += 1
        elif kind.name in TYPES:
            types[tensor.name.removesuffix(".weight")] = kind.name
        else:
            dequantised[f"of type {kind.name}"] += 1
    return KeptBlocks(types, dequantised)


logger = logging.getLogger(__name__)

_MAX_SHARD_BYTES = 4 * 1000**3
# Matrices that layers stack.
_STACKED: Sequence[tuple[str, ...]] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_EXPERTS: Sequence[tuple[str, ...]] = (("gate_proj", "up_proj"), ("down_proj",))
_SPARE_BYTES = 64 * 1000**2
# In the names of folders that are being written.
_TEMPORARY = ".tmp-"
_MAX_THREADS = 8


def converted_folder(
    file: GGUFFile, dtype: torch.dtype, with_tokenizer: bool, keeps_blocks: bool = False
) -> Path:
    """The Hugging Face folder of a GGUF file, converted now if it is not in the cache.

    Args:
        dtype: of the weights in the folder that are plain numbers.
        keeps_blocks: quantised matrices keep their bits, where there is a format for them.
        with_tokenizer: false when the user gives another tokenizer; the file's vocabulary then need
            not be supported.

    Raises:
        ConfigError: when the model is not supported or the cache cannot be written.
        WeightError: when the file is damaged, or was changed since its header was read.
    """
    check_architecture(file)
    suffix = ("-kept" if keeps_blocks else "") + ("" if with_tokenizer else "-bare")
    dtype_name = str(dtype).removeprefix("torch.")
    cache = cache_dir() / "gguf"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        key = content_key(file.paths, file.identity, cache, default_num_threads())
        folder = cache / f"{key}-v{CONVERTER_VERSION}-{dtype_name}{suffix}"
        use(folder)
        if not is_stored(folder):
            with _lock(folder) as locked:
                if locked:
                    _remove_left_behind(folder)
                _set_aside_unless_stored(folder)
                if not folder.is_dir():
                    _convert(file, dtype, with_tokenizer, keeps_blocks, folder)
    except OSError as error:
        raise ConfigError(
            f"cannot write the converted {file.path.name} to {cache}: {error}; "
            f"set ATOM_CACHE to a folder with enough room"
        ) from error
    bring_to_disk(folder)
    return folder


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock; yields false if the file system has no locks."""
    path = _lock_file(folder.parent, folder.name)
    try:
        descriptor = locks.lock_alone(path, f"converting to {folder}")
    except OSError as error:
        logger.warning("no lock in %s: %s", folder.parent, error)
        yield False
        return
    try:
        yield True
    finally:
        locks.remove(path, descriptor)


def _lock_file(cache: Path, name: str) -> Path:
    return cache / f".{name}.lock"


def _convert(
    file: GGUFFile, dtype: torch.dtype, with_tokenizer: bool, keeps_blocks: bool, folder: Path
) -> None:
    temporary = _temporary(folder)
    temporary.mkdir()
    try:
        try:
            _write_folder(file, dtype, with_tokenizer, keeps_blocks, temporary)
        finally:
            check_unchanged(file.paths, file.identity)
        note_written(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            # Without a lock another process may have finished first; use its result.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _set_aside_unless_stored(folder: Path) -> None:
    """Remove a folder that has lost something; who has opened its files keeps them."""
    if not folder.is_dir():
        return
    try:
        check_stored(folder)
    except NotStored as error:
        logger.warning("%s is converted again: %s", folder, error)
        aside = folder.rename(_temporary(folder))
        shutil.rmtree(aside, ignore_errors=True)


def _temporary(folder: Path) -> Path:
    return folder.parent / f".{folder.name}{_TEMPORARY}{uuid.uuid4().hex}"


def _remove_left_behind(folder: Path) -> None:
    """Remove folders of killed processes, of any file; call only with the lock of `folder` held."""
    for entry in folder.parent.glob(f".*{_TEMPORARY}*"):
        name = entry.name[1:].rpartition(_TEMPORARY)[0]
        if name == folder.name:
            shutil.rmtree(entry, ignore_errors=True)
            continue
        # Not where another process converts, or the file system has no locks.
        with contextlib.suppress(OSError):
            path = _lock_file(folder.parent, name)
            descriptor = locks.lock(path, locks.ALONE | locks.AT_ONCE)
            shutil.rmtree(entry, ignore_errors=True)
            locks.remove(path, descriptor)


def _write_folder(
    file: GGUFFile, dtype: torch.dtype, with_tokenizer: bool, keeps_blocks: bool, folder: Path
) -> None:
    config = config_dict(file, dtype)
    tensors = plan_tensors(file, config)
    kept = choose_kept(tensors) if keeps_blocks else KeptBlocks({}, {})
    by_kernels = bool(kept.types) and kernels_read_codes()  # compiled before threads use them
    if kept.types:
        config["quantization_config"] = config_of(kept.types, kept.dequantised)
    groups = [_group(tensor, kept, dtype, by_kernels) for tensor in tensors]
    specs = [spec for group in groups for spec in group.specs]
    specs.sort(key=partial(_place, {spec.name: i for i, spec in enumerate(specs)}))
    needed = sum(spec.num_bytes for spec in specs) + _SPARE_BYTES
    make_room(folder.parent, needed, cache_limit())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config_dict(file))
    if with_tokenizer:
        write_tokenizer(file, folder)
    pooling = file.metadata.get(f"{file.architecture}.{POOLING}", int, NONE)
    if pooling != NONE:
        write_modules(pooling, folder)
    _write_weights(file, specs, groups, folder)


def _place(order: Mapping[str, int], spec: TensorSpec) -> tuple[int, str, int]:
    """Where a tensor lies: behind those that layers stack above it, so that one map has them."""
    name = spec.name
    if match := re.fullmatch(rf"(.*\.experts\.)(\d+)\.({'|'.join(chain(*_EXPERTS))})(\..*)", name):
        prefix, expert, module, part = match.groups()
        stacks, prefix, before = _EXPERTS, f"{prefix}0.", int(expert)
    elif match := re.fullmatch(rf"(.*\.)({'|'.join(chain(*_STACKED))})(\..*)", name):
        prefix, module, part = match.groups()
        stacks, before = _STACKED, 0
    else:
        return order[name], "", 0
    stack = next(names for names in stacks if module in names)
    first = min(order.get(prefix + other + ".weight", len(order)) for other in stack)
    return first, part, before * len(stack) + stack.index(module)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _group(
    tensor: ConvertedTensor, kept: KeptBlocks, dtype: torch.dtype, by_kernels: bool
) -> TensorGroup:
    """A matrix whose blocks are kept is several tensors, others are one of plain numbers."""
    module = tensor.name.removesuffix(".weight")
    if module not in kept.types:
        if module.endswith(PRECISE):
            dtype = torch.float32
        spec = TensorSpec(tensor.name, tensor.shape, dtype)
        return TensorGroup((spec,), lambda: ((each,) for each in read_values(tensor, dtype)))
    rows, columns = tensor.shape
    parts = stored_tensors(kept.types[module])
    specs = tuple(
        TensorSpec(f"{module}.{part}", (rows, columns // stored.axes[1].per), stored.dtype)
        for part, stored in parts.items()
    )
    return TensorGroup(specs, partial(read_blocks, tensor, tuple(parts), by_kernels))


def _write_weights(
    file: GGUFFile, specs: Sequence[TensorSpec], groups: Sequence[TensorGroup], folder: Path
) -> None:
    with (
        single_threaded_pool(min(_MAX_THREADS, default_num_threads())) as pool,
        tqdm(
            total=sum(spec.num_bytes for spec in specs),
            unit="B",
            unit_scale=True,
            desc=f"Converting {file.path.name}",
            disable=None,
        ) as bar,
    ):

        def show(num_bytes: int) -> None:
            with bar.get_lock():
                bar.update(num_bytes)

        write_checkpoint(folder, specs, groups, _MAX_SHARD_BYTES, pool, show)
