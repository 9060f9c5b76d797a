"""Loads a checkpoint's weights into a model; no tensor may be missing or left over.

Placement is decided and checked from the file headers, before weights are read. Then threads copy
small groups of tensors. Each group maps its bytes of the file and unmaps them when done, so that
file pages and copies are never all in memory at once; what a layer keeps as it is in a converted
file stays mapped instead (`mapped_weights`). A mapped tensor is read only where a layer copies from
it: a rank reads its part. A layer is converted as soon as its last tensor was copied.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from atom.config import ModelOptions
from atom.model_loader.checkpoint import list_adapters, list_tensors
from atom.model_loader.errors import WeightError, name_some
from atom.model_loader.gguf.cache import is_in_use
from atom.model_loader.layers import LayerQueue
from atom.model_loader.mapped_weights import map_parameters
from atom.model_loader.packed_file import forget_read_ahead
from atom.model_loader.packed_weights import packed_cache
from atom.model_loader.placement import Placement, Target, find_targets, place_tensors, raise_if_any
from atom.model_loader.quantization import on_platform
from atom.model_loader.safetensors.reader import WeightFile
from atom.model_loader.sketch import M, check_fit
from atom.model_loader.source import ModelSource
from atom.model_loader.threads import single_threaded_pool
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.weight_mapping import WeightMapping
from atom.processors import default_num_threads

# Dummy weights, to run a model without its checkpoint.

_SPREAD = 0.02


@torch.no_grad()
def fill_with_dummy_weights(model: nn.Module) -> None:
    """Fill every parameter with small random numbers, seeded by its name.

    Vectors named `weight` (norms) are around one, so that activations keep their scale; all others
    are around zero. Codes of quantised weights are random bits, their scales small.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        if name.rpartition(".")[2].rpartition("_")[2] in ("d2t", "idx"):
            parameter.zero_()
            continue
        if "scale" in name:
            _fill_scale(parameter)
            continue
        if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:
            _fill_codes(parameter, generator)
            continue
        parameter.uniform_(-_SPREAD, _SPREAD, generator=generator)
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.add_(1)


def _fill_scale(scale: torch.Tensor) -> None:
    if scale.dtype is torch.uint8:  # e8m0: 2^-6
        scale.fill_(121)
    else:
        scale.fill_(_SPREAD)


def _fill_codes(codes: torch.Tensor, generator: torch.Generator) -> None:
    """Random bits; of an 8-bit float only numbers up to 2."""
    most = 0x40 if codes.dtype.is_floating_point else 0x80
    codes.view(torch.uint8).random_(0, most, generator=generator)


# Reads weight files into the page cache, one file ahead of the loader.

_BUFFER_BYTES = 8 << 20


class ReadAhead:
    """Reads files sequentially, in order, in a background thread.

    Page faults of a memory map fetch small pieces in access order, each a round trip on network
    storage; sequential reads use the full bandwidth. At most one file is read ahead, so that a
    checkpoint larger than memory does not evict its own pages.
    """

    def __init__(self, files: Sequence[Path], enabled: bool) -> None:
        self._waiting = list(files) if enabled else []
        self._running: dict[Path, Future[None]] = {}
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> ReadAhead:
        self._start_next()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def wait_for(self, file: Path) -> None:
        """Wait until the file is in the page cache; then the next one is read."""
        reading = self._running.pop(file, None)
        if reading is not None:
            reading.result()
            self._start_next()

    def _start_next(self) -> None:
        if self._waiting:
            file = self._waiting.pop(0)
            self._running[file] = self._pool.submit(_read, file)


def _read(file: Path) -> None:
    buffer = bytearray(_BUFFER_BYTES)
    with file.open("rb", buffering=0) as handle:
        if sys.platform == "linux":
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        while handle.readinto(buffer):
            pass


__all__ = ["WeightError", "build_model", "load_weights"]

logger = logging.getLogger(__name__)

_GROUP_BYTES = 32 << 20
# Of tensors that are copied from at the same time.
_BYTES_IN_FLIGHT = 1 << 30
_MAX_THREADS = 8
_GB = 1e9


def build_model(
    create: Callable[[LayerContext], M],
    source: ModelSource,
    context: LayerContext,
    options: ModelOptions,
    checked: Callable[[], None] = lambda: None,
) -> M:
    """Build a model and load its weights; checks run before memory is allocated.

    Args:
        create: builds the model with uninitialised weights; called twice, first for the checks.
        checked: called after the checks, which have chosen the layers' ops.

    Raises:
        ConfigError, WeightError: as `check_fit` and `load_weights`.
    """
    quant = on_platform(source.quantization, context.ops.platform)
    context = replace(context, quant=quant, activations=options.activations)
    if context.device.type == "meta":  # a rehearsal, which has sizes alone
        model = create(context)
        _raise_wrong(LayerQueue(model, ()).convert_rest(), source)
        return model
    is_dummy = options.load_format == "dummy"
    check_fit(create, None if is_dummy else list_tensors(source.path), source, context)
    checked()
    model = create(context)
    load_weights(model, model.weight_mapping, source, options)
    return model


def load_weights(
    model: nn.Module, mapping: WeightMapping, source: ModelSource, options: ModelOptions
) -> None:
    """Copy every tensor of the checkpoint into the model's parameters, in place, and convert
    layers to the form that their ops read.

    Args:
        model: on its device, parameters uninitialised.
        mapping: from the checkpoint's names to the model's.

    Raises:
        WeightError: for tensors that are missing, unexpected, of a wrong shape or an unsupported
            dtype, too large for the model's dtype, not finite, or of no use to their layer.
    """
    targets = find_targets(model)
    if on_meta := [name for name, t in targets.items() if t.parameter.is_meta]:
        raise ValueError(
            f"weights are loaded in place, but these have no memory (meta device): "
            f"{name_some(on_meta)}"
        )
    if options.load_format == "dummy":
        fill_with_dummy_weights(model)
        _raise_wrong(LayerQueue(model, ()).convert_rest(), source)
        return
    if adapters := list_adapters(source.path):
        names = ", ".join(path.name for path in adapters)
        logger.warning("%s: adapters are not applied: %s", source.path, names)
    placements = place_tensors(list_tensors(source.path), mapping, targets, source.path)
    prefetch = options.safetensors_load_strategy == "prefetch"
    num_bytes = _num_bytes(targets)  # before conversion changes it
    started = time.perf_counter()
    packed = packed_cache(source.path, model, placements) if is_in_use(source.path) else None
    left = None if packed is None else packed.restore(placements)
    forget_read_ahead()
    layers = LayerQueue(model, placements if left is None else left)
    _copy_all(placements if left is None else left, layers, source, read_ahead=prefetch)
    _raise_wrong(layers.convert_rest(), source)
    _log_speed(source, placements, num_bytes, time.perf_counter() - started)
    if packed is not None and left is None:
        packed.save()


def _num_bytes(targets: dict[str, Target]) -> int:
    """Of all parameters; one that two modules share counts once."""
    parameters = {id(target.parameter): target.parameter for target in targets.values()}
    return sum(parameter.nbytes for parameter in parameters.values())


def _log_speed(
    source: ModelSource, placements: list[Placement], num_bytes: int, seconds: float
) -> None:
    logger.info(
        "%s: loaded %.2f GB of weights from %.2f GB of files in %.1f s, %.2f GB/s",
        source.name,
        num_bytes / _GB,
        sum(placement.tensor.num_bytes for placement in placements) / _GB,
        seconds,
        num_bytes / _GB / seconds,
    )


def _copy_all(
    placements: list[Placement], layers: LayerQueue, source: ModelSource, read_ahead: bool
) -> None:
    by_file = [(path, list(of)) for path, of in groupby(placements, key=lambda p: p.tensor.file)]
    total = sum(placement.tensor.num_bytes for placement in placements)
    num_threads = min(_MAX_THREADS, default_num_threads())
    what = f"Loading {source.name}"
    is_cached = is_in_use(source.path)
    with (
        ReadAhead([path for path, _ in by_file], enabled=read_ahead) as ahead,
        single_threaded_pool(num_threads) as pool,
        tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None) as bar,
    ):
        for path, of_file in by_file:
            ahead.wait_for(path)
            with WeightFile(path) as file:
                try:
                    errors = []
                    mapped = map_parameters(file, of_file) if is_cached else set()
                    for result in _copied(pool, file, of_file, layers, bar, mapped):
                        errors += result
                        errors += layers.convert_loaded()
                    _raise_wrong(errors, source)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise


def _copied(
    pool: Executor,
    file: WeightFile,
    placements: list[Placement],
    layers: LayerQueue,
    bar: tqdm,
    mapped: Set[str],
) -> Iterator[list[str]]:
    """Copy a file's tensors but for those that are mapped, group by group -> the errors of each.

    A group counts as in flight until the caller asks for the next, so that layers which wait to be
    converted stay few.
    """
    copying: deque[tuple[int, Future[list[str]]]] = deque()
    in_flight = 0
    for group in _groups(placements):
        num_bytes = sum(placement.tensor.num_bytes for placement in group)
        while copying and in_flight + num_bytes > _BYTES_IN_FLIGHT:
            size, future = copying.popleft()
            yield future.result()
            in_flight -= size
            bar.update(size)
        copying.append((num_bytes, pool.submit(_copy_group, file, group, layers, mapped)))
        in_flight += num_bytes
    for size, future in copying:
        yield future.result()
        bar.update(size)


def _raise_wrong(errors: list[str], source: ModelSource) -> None:
    if errors:
        listed = name_some(sorted(errors))
        raise_if_any([f"wrong tensors ({len(errors)}): {listed}"], source.path)


def _groups(placements: list[Placement]) -> Iterator[list[Placement]]:
    """Consecutive tensors of a file, up to 32 MiB per group."""
    group: list[Placement] = []
    size = 0
    for placement in placements:
        if group and size + placement.tensor.num_bytes > _GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(placement)
        size += placement.tensor.num_bytes
    if group:
        yield group


@torch.no_grad()
def _copy_group(
    file: WeightFile, group: list[Placement], layers: LayerQueue, mapped: Set[str]
) -> list[str]:
    """Copy tensors of one file, but for those that are mapped; returns the errors of those that do
    not fit.
    """
    errors = []
    for placement, values in zip(group, file.map([p.tensor for p in group]), strict=True):
        try:
            if placement.tensor.name not in mapped:
                placement.copy(values)
        except ValueError as error:
            errors.append(f"{placement.tensor.name}: {error}")
        else:
            errors += layers.loaded(placement)
    return errors
