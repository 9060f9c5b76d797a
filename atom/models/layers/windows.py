"""Which window a layer attends to, as its configuration says."""

from __future__ import annotations

from atom.config import ConfigError
from atom.models.config.model_config import PretrainedConfig


def window_of_type(config: PretrainedConfig, layer_id: int) -> int | None:
    """The window of a layer whose entry of `layer_types` says that it has one; None for all keys.

    Raises:
        ConfigError: for another type of layer, or without a window.
    """
    kind = config.layer_types[layer_id]
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise ConfigError(
            f"layer_types says {kind!r} of layer {layer_id}; supported are full_attention and "
            f"sliding_attention"
        )
    if config.sliding_window is None:
        raise ConfigError(
            f"layer_types says that layer {layer_id} attends to a window, and there is no "
            f"sliding_window"
        )
    return int(config.sliding_window)
