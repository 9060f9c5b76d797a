"""Configuration classes for model types that transformers does not have."""

from __future__ import annotations

from transformers import AutoConfig, DeepseekV3Config


class KimiK2Config(DeepseekV3Config):  # type: ignore[misc]  # transformers is untyped here
    """Kimi-K2's text model, which is DeepSeek-V3."""

    model_type = "kimi_k2"


def register_model_types() -> None:
    """Register them with `AutoConfig`; may be called repeatedly."""
    AutoConfig.register(KimiK2Config.model_type, KimiK2Config, exist_ok=True)
