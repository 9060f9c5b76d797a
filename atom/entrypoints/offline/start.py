"""Starts an engine in a program that has its process to itself."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from atom.model_engine.arg_utils import EngineOptions, engine_config, speculation_of
from atom.model_loader import ahead
from atom.model_loader.gguf.content import forget_hashed_ahead

if TYPE_CHECKING:
    from atom.entrypoints.llm import LLM


def start_llm(given: EngineOptions) -> LLM:
    """An `LLM` of these options, before which nothing has imported torch.

    Raises:
        ConfigError: as `LLM`.
    """
    # What a start makes stays; looking for garbage in it would take a tenth of the time.
    gc.disable()
    try:
        ahead.begin(engine_config(**given).model)
        from atom.entrypoints.llm import LLM

        return LLM(**given, no_speculation=not speculation_of(given))
    finally:
        gc.enable()
        forget_hashed_ahead()  # after an error an exit would wait for all of a file
