"""The model's maximum context length, and the one that the engine serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atom.config import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def model_context_len(config: PretrainedConfig) -> int:
    """The number of positions that the model config allows, including RoPE scaling.

    `linear` and `dynamic` scaling multiply `max_position_embeddings`; in `yarn` and `llama3`
    configs it is the scaled length already.
    """
    length = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}  # some models do not rotate
    if rope.get("rope_type") in ("linear", "dynamic"):
        length = int(length * rope["factor"])
    return length


def resolve_max_model_len(config: PretrainedConfig, requested: int | None) -> int:
    """The context length to serve: `requested`, or the model's limit if None.

    Raises:
        ConfigError: when more is requested than the model allows.
    """
    limit = model_context_len(config)
    if requested is None:
        return limit
    if requested > limit:
        raise ConfigError(
            f"max_model_len={requested} exceeds the {limit} positions of the model's config"
        )
    return requested
