"""Whose fault an error is."""

from __future__ import annotations


def is_users(error: BaseException) -> bool:
    """Whether options, checkpoint or machine are at fault, so that the message suffices for
    users.
    """
    # Not above: a process that only asks must not wait for torch.
    from atom.config import ConfigError
    from atom.kv_cache.base import KVCacheMemoryError
    from atom.model_loader.errors import WeightError
    from atom.model_ops.registry import OpUnavailableError

    return isinstance(error, (ConfigError, WeightError, KVCacheMemoryError, OpUnavailableError))
