"""What the log says while an engine starts, and once it can run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from atom.distributed.stages import Stages
from atom.messages import EngineLimits
from atom.model_engine.rank import Rank, dtype_name
from atom.model_ops.attention.kv_scale import FP8_TYPES, KVScale
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.quant.formats.gguf import GgufConfig

logger = logging.getLogger(__name__)

# How often a start says what it waits for; where it waits for nothing in particular, how often it
# says what it is doing.
WAIT_SECONDS = 5.0
STAGE_SECONDS = 30.0


@contextmanager
def said_what_is_awaited(stages: Stages, awaited: Callable[[], list[str]]) -> Iterator[None]:
    """While an engine starts in here, the log says every few seconds what takes so long.

    Args:
        stages: of the start.
        awaited: what is waited for now, one phrase each; called by another thread.
    """
    ended = threading.Event()
    thread = threading.Thread(
        target=_say_what_is_awaited, args=(stages, awaited, ended), name="start-log", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _say_what_is_awaited(
    stages: Stages, awaited: Callable[[], list[str]], ended: threading.Event
) -> None:
    said_at = time.monotonic()
    while not ended.wait(WAIT_SECONDS):
        begun, now = stages.begun, time.monotonic()
        if now - begun.at < WAIT_SECONDS:
            continue
        causes = awaited()
        if causes or now - max(said_at, begun.at) >= STAGE_SECONDS:
            said_at = now
            seconds = now - begun.at
            logger.info("; ".join([f"{begun.stage.what} for {seconds:.0f} s", *causes]))


def log_start(
    rank: Rank, models: Sequence[nn.Module], limits: EngineLimits, seconds: float
) -> None:
    """Args:
    models: the target, and the draft if there is one.
    seconds: that the start took.
    """
    source, platform, ops = rank.source, rank.platform, rank.context.ops
    num_ranks = rank.groups.tp.size
    logger.info("model: %s", source.implementation)
    logger.info("ops:\n%s", ops.describe())
    if platform.kind == "cpu" and (reason := native_build().reason) is not None:
        logger.warning(
            "PyTorch's operations run, many times slower than the C++ kernels, which could not be "
            "built: %s",
            " ".join(reason.split()),
        )
    if isinstance(source.quantization, GgufConfig):
        logger.info("weights: %s", source.quantization)
    if rank.storage in FP8_TYPES:
        _log_scales(models)
    if (length := limits.synthetic_acceptance_length) is not None:
        logger.warning(
            "drafts are accepted at random, %g tokens a step: answers mean nothing", length
        )
    if (window := limits.window) is not None:
        logger.info(
            "layers with a window, of at most %d tokens, have KV blocks of their own: %d",
            window.num_tokens,
            window.num_blocks,
        )
    logger.info(
        "%s in %s%s on %s (%s)%s: context %d, %d KV blocks of %d tokens in %s, ready in %.1f s",
        source.name,
        dtype_name(rank.context.dtype),
        f" ({limits.weights})" if limits.weights else "",
        platform.kind,
        platform.arch,
        f", {num_ranks} ranks" if num_ranks > 1 else "",
        limits.max_model_len,
        limits.num_blocks,
        limits.block_size,
        dtype_name(rank.storage),
        seconds,
    )


def _log_scales(models: Sequence[nn.Module]) -> None:
    modules = [module for model in models for module in model.modules()]
    scales = [module for module in modules if isinstance(module, KVScale)]
    logger.info(
        "KV cache scales: the checkpoint's in %d of %d attention layers, 1 elsewhere",
        sum(scale.is_given for scale in scales),
        len(scales),
    )
