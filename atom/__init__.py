"""ATOM: LLM inference with lossless Eagle3 speculative decoding."""

from __future__ import annotations

from atom.version import __version__

TYPE_CHECKING = False  # the same to type checkers; importing it would take most of the time
if TYPE_CHECKING:
    from typing import Any

    from atom.entrypoints.llm import LLM
    from atom.outputs import (
        CompletionOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from atom.sampling_params import SamplingParams
    from atom.structured_output.outputs_params import StructuredOutputsParams
    from atom.structured_output.params import StructuredOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutput",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "atom.entrypoints.llm",
    "SamplingParams": "atom.sampling_params",
    "StructuredOutput": "atom.structured_output.params",
    "StructuredOutputsParams": "atom.structured_output.outputs_params",
    "RequestOutput": "atom.outputs",
    "CompletionOutput": "atom.outputs",
    "EmbeddingRequestOutput": "atom.outputs",
    "ScoringRequestOutput": "atom.outputs",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import atom` must stay instant, torch is not."""
    if name not in _HOMES:
        raise AttributeError(f"module 'atom' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
