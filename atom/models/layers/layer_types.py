"""Which layers of a hybrid model have attention."""

from __future__ import annotations

from atom.config import ConfigError
from atom.models.config.model_config import PretrainedConfig


def is_linear(config: PretrainedConfig, layer_id: int) -> bool:
    """Whether `layer_types` says that a layer has linear attention.

    Raises:
        ConfigError: for another type of layer than that and full attention.
    """
    kind = config.layer_types[layer_id]
    if kind not in ("linear_attention", "full_attention"):
        raise ConfigError(
            f"layer_types says {kind!r} of layer {layer_id}; supported are linear_attention and "
            f"full_attention"
        )
    return bool(kind == "linear_attention")
