"""Whether a step is launched before the results of the one before it are read."""

from __future__ import annotations

import logging

from atom.config import ConfigError, EngineConfig
from atom.platform import Platform

logger = logging.getLogger(__name__)


def overlaps(config: EngineConfig, platform: Platform) -> bool:
    """Whether this engine overlaps its steps: on a GPU unless told otherwise, where it can.

    Raises:
        ConfigError: for `--overlap` where it cannot.
    """
    wanted = config.scheduler.overlap
    if wanted is False or (wanted is None and not platform.is_gpu):
        return False
    obstacle = _obstacle(config)
    if obstacle is None:
        return True
    if wanted:
        raise ConfigError(f"overlap: {obstacle}; leave --overlap out")
    logger.info("steps are not overlapped: %s", obstacle)
    return False


def _obstacle(config: EngineConfig) -> str | None:
    parallel, speculative = config.parallel, config.speculative
    if parallel.tensor_parallel_size > 1 or parallel.couples_engines:
        return "several ranks take part in each step and must know the tokens that it begins with"
    if speculative is not None and speculative.looks_up:
        return "the host looks the newest tokens up before each step"
    if speculative is not None and speculative.synthetic_acceptance_length is not None:
        return "synthetic acceptance is decided by positions that the host must know"
    return None
