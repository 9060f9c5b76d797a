"""Configurations of published checkpoints that transformers has no name for."""

from __future__ import annotations

from transformers import AutoConfig, DeepseekV3Config


class KimiK2Config(DeepseekV3Config):  # type: ignore[misc]  # transformers is untyped here
    """Kimi-K2's text network is DeepSeek-V3 under another name."""

    model_type = "kimi_k2"


def register_model_types() -> None:
    """Let `AutoConfig` read them; calling it again changes nothing."""
    AutoConfig.register(KimiK2Config.model_type, KimiK2Config, exist_ok=True)
