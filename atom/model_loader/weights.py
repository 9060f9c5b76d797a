"""Loads a checkpoint's weights into a model; no tensor may be missing or left over.

Placement is decided and checked from the file headers, before weights are read. Then threads copy
small groups of tensors. Each group maps its file anew and unmaps it when done, so that file pages
and copies are never all in memory at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from atom.config import ModelOptions
from atom.model_loader.checkpoint import list_adapters, list_tensors
from atom.model_loader.dummy import fill_with_dummy_weights
from atom.model_loader.errors import WeightError, name_some
from atom.model_loader.finite import check_finite, may_be_infinite
from atom.model_loader.placement import Placement, find_targets, place_tensors, raise_if_any
from atom.model_loader.read_ahead import ReadAhead
from atom.model_loader.sketch import M, check_fit
from atom.model_loader.source import ModelSource
from atom.model_loader.threads import one_torch_thread
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.weight_mapping import ConvertsWeights, WeightMapping
from atom.platform import default_num_threads

__all__ = ["WeightError", "build_model", "load_weights"]

logger = logging.getLogger(__name__)

_GROUP_BYTES = 32 << 20
_MAX_THREADS = 8


def build_model(
    create: Callable[[LayerContext], M],
    source: ModelSource,
    context: LayerContext,
    options: ModelOptions,
) -> M:
    """Build a model and load its weights; checks run before memory is allocated.

    Args:
        create: builds the model with uninitialised weights; called twice, first for the checks.

    Raises:
        ConfigError, WeightError: as `check_fit` and `load_weights`.
    """
    context = replace(context, quant=source.quantization)
    is_dummy = options.load_format == "dummy"
    check_fit(create, None if is_dummy else list_tensors(source.path), source, context)
    model = create(context)
    load_weights(model, model.weight_mapping, source, options)
    process_after_loading(model, source)
    return model


def process_after_loading(model: nn.Module, source: ModelSource) -> None:
    """Convert every layer's weights to the layout that its op reads, layer by layer.

    Raises:
        WeightError: for quantised weights whose values are of no use.
    """
    for name, module in model.named_modules():
        if isinstance(module, ConvertsWeights):
            try:
                module.process_after_loading()
            except ValueError as error:
                raise_if_any([f"{name}: {error}"], source.path)


def load_weights(
    model: nn.Module, mapping: WeightMapping, source: ModelSource, options: ModelOptions
) -> None:
    """Copy every tensor of the checkpoint into the model's parameters, in place.

    Args:
        model: on its device, parameters uninitialised.
        mapping: from the checkpoint's names to the model's.

    Raises:
        WeightError: for tensors that are missing, unexpected, of a wrong shape or an unsupported
            dtype, too large for the model's dtype, or not finite.
    """
    targets = find_targets(model)
    if on_meta := [name for name, t in targets.items() if t.parameter.is_meta]:
        raise ValueError(
            f"weights are loaded in place, but these have no memory (meta device): "
            f"{name_some(on_meta)}"
        )
    if options.load_format == "dummy":
        fill_with_dummy_weights(model)
        return
    if adapters := list_adapters(source.path):
        names = ", ".join(path.name for path in adapters)
        logger.warning("%s: adapters are not applied: %s", source.path, names)
    placements = place_tensors(list_tensors(source.path), mapping, targets, source.path)
    _copy_all(placements, source, read_ahead=options.safetensors_load_strategy == "prefetch")
    _check_matrices(placements, source)


def _copy_all(placements: list[Placement], source: ModelSource, read_ahead: bool) -> None:
    by_file = [(file, list(of)) for file, of in groupby(placements, key=lambda p: p.tensor.file)]
    total = sum(placement.tensor.num_bytes for placement in placements)
    lock = threading.Lock()
    what = f"Loading {source.name}"
    with (
        one_torch_thread(),
        ReadAhead([file for file, _ in by_file], enabled=read_ahead) as ahead,
        ThreadPoolExecutor(min(_MAX_THREADS, default_num_threads())) as pool,
        tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None) as bar,
    ):

        def advance(num_bytes: int) -> None:
            with lock:
                bar.update(num_bytes)

        for file, of_file in by_file:
            ahead.wait_for(file)
            copying = [pool.submit(_copy_group, file, g, advance) for g in _groups(of_file)]
            try:
                errors = [error for future in copying for error in future.result()]
                _raise_wrong(errors, source)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _check_matrices(placements: list[Placement], source: ModelSource) -> None:
    """Refuse NaN and infinity in matrices on a GPU; files are read again only if a sum is not
    finite.
    """
    parameters = {
        id(placement.target.parameter): placement.target.parameter
        for placement in placements
        if _is_summed_later(placement)
    }
    suspects = {key for key, parameter in parameters.items() if may_be_infinite(parameter)}
    errors = []
    for placement in placements:
        if id(placement.target.parameter) not in suspects:
            continue
        with safe_open(placement.tensor.file, "pt") as handle:
            try:
                check_finite(handle.get_tensor(placement.tensor.name))
            except ValueError as error:
                errors.append(f"{placement.tensor.name}: {error}")
    _raise_wrong(errors, source)


def _is_summed_later(placement: Placement) -> bool:
    """Whether to check the values on the device, where it is faster."""
    return len(placement.tensor.shape) > 1 and placement.target.parameter.device.type != "cpu"


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
def _copy_group(file: Path, group: list[Placement], advance: Callable[[int], None]) -> list[str]:
    """Copy tensors of one file; returns the errors of those that do not fit."""
    errors = []
    try:
        with safe_open(file, "pt") as handle:
            for placement in group:
                tensor = placement.tensor
                try:
                    values = handle.get_tensor(tensor.name)
                    placement.copy(values)
                    if not _is_summed_later(placement):
                        check_finite(values)
                except ValueError as error:
                    errors.append(f"{tensor.name}: {error}")
                advance(tensor.num_bytes)
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{file} cannot be read: {error}; fetch it again") from error
    return errors
