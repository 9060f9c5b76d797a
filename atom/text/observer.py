"""What a metrics layer may watch of the requests' lives."""

from __future__ import annotations

from typing import Protocol

from atom.outputs import RequestMetrics


class EngineObserver(Protocol):
    """Called from the thread that processes the engine's outputs; must be quick.

    Times are seconds. A request with n > 1 has one time to first token and n sequences.
    """

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        """A request's first token came that long after its arrival."""

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        """A sequence grew, that long after it last did (None for its first tokens)."""

    def on_request_finished(
        self,
        metrics: RequestMetrics,
        finish_reason: str,
        num_prompt_tokens: int,
        num_output_tokens: int,
    ) -> None:
        """A request ended, aborted ones included.

        With n > 1 the reason is that of the first sequence, or `abort` when any was aborted;
        the output tokens are those of all sequences.
        """


class NullObserver:
    """Watches nothing."""

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        pass

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        pass

    def on_request_finished(
        self,
        metrics: RequestMetrics,
        finish_reason: str,
        num_prompt_tokens: int,
        num_output_tokens: int,
    ) -> None:
        pass
