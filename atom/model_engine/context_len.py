"""How long a context the model was made for, and how long the engine serves."""

from __future__ import annotations

from transformers import PretrainedConfig

from atom.config import ConfigError


def model_context_len(config: PretrainedConfig) -> int:
    """Positions that the checkpoint's config allows, rope scaling included.

    `linear` and `dynamic` scaling stretch `max_position_embeddings`; `yarn` and `llama3`
    configs state the stretched length themselves.
    """
    length = int(config.max_position_embeddings)
    rope = config.rope_parameters
    if rope.get("rope_type") in ("linear", "dynamic"):
        length = int(length * rope["factor"])
    return length


def resolve_max_model_len(config: PretrainedConfig, requested: int | None) -> int:
    """The context to serve.

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
