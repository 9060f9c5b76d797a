"""The interface of a metrics layer."""

from __future__ import annotations

from typing import Protocol

from atom.outputs import RequestMetrics


class EngineObserver(Protocol):
    """Called by the thread that processes the engine's outputs; must be fast.

    Times are in seconds. A request with n > 1 has one time to first token and n sequences.
    """

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        """A request's first token arrived `seconds` after the request."""

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        """A sequence got tokens, `seconds` after its previous ones (None for the first)."""

    def on_request_finished(
        self,
        metrics: RequestMetrics,
        finish_reason: str,
        num_prompt_tokens: int,
        num_output_tokens: int,
    ) -> None:
        """A request finished or was aborted.

        With n > 1, the reason is that of the first sequence, or `abort` if any was aborted; the
        output tokens are those of all sequences.
        """


class NullObserver:
    """Ignores all events."""

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
